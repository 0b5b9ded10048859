"""Python values are stored and read without pickle."""

import enum
import io
import math
import pickle
import subprocess
import sys
from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import field, make_dataclass

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataplane_core import InMemoryDataPlaneClient, InvalidRequestError, InvalidTypeError
from dataplane_core.tensors.object_codec import decode_object, encode_object
from dataplane_core.tensors.object_types import register_object_type

text = st.text(st.characters())  # with lone surrogates
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | text | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(text | st.integers(), inner),
    max_leaves=12,
)


def stored(value):
    """Return a value as a store returns it."""
    column = np.empty(1, dtype=object)
    column[0] = value
    with InMemoryDataPlaneClient() as client:
        client.register_partition("p", ["f"], 1, [])
        client.put_columns(["a"], "p", {"f": column})
        return client.get_columns(["a"], "p", ["f"])["f"][0]


class Role(enum.StrEnum):
    """Enum whose members equal their texts."""

    USER = "user"


class Level(enum.IntEnum):
    """Enum whose members equal their numbers."""

    LOW = 1


class Image(np.ndarray):
    """Array subclass with a meaning beyond its numbers."""


@given(plain)
def test_plain_values_come_back_equal(value):
    assert stored(value) == value


@pytest.mark.parametrize("inner", [2**70, -(2**70), "\ud800"], ids=["large", "small", "surrogate"])
def test_containers_and_enums_hold_large_numbers_and_any_text(inner):
    pair = namedtuple("pair", "a")
    point = make_dataclass("Point", ["a", ("b", object, field(init=False))])
    slotted = make_dataclass("Slotted", ["a"], slots=True)
    member = enum.Enum("Member", {"a": inner}).a
    for value, plain in (
        (OrderedDict(a=inner), {"a": inner}),
        (OrderedDict({inner: 1}), {inner: 1}),
        (defaultdict(list, a=[inner]), {"a": [inner]}),
        (pair(inner), [inner]),
        (point(OrderedDict(a=member)), {"a": {"a": inner}}),
        (slotted(inner), {"a": inner}),
        (np.str_("a"), "a"),
    ):
        assert stored([value, inner]) == [plain, inner]
    assert stored(np.str_("\ud800")) == "\ud800"


class Struct(msgspec.Struct):
    """Struct of msgspec, which the codec does not open."""

    a: object


@pytest.mark.parametrize("inner", [2**70, "\ud800"], ids=["large", "surrogate"])
def test_large_number_or_text_in_a_struct_is_refused_or_pickled(inner):
    with pytest.raises(InvalidTypeError, match=r"field 'f': .* msgspec\.Struct, an attrs object"):
        stored([Struct(inner)])
    assert stored([Struct(1), inner]) == [{"a": 1}, inner]
    data = encode_object("a value", [Struct(inner)], allow_pickle=True)
    assert decode_object(data, allow_pickle=True) == [Struct(inner)]


@pytest.mark.parametrize("inner", [2**70, "\ud800"], ids=["large", "surrogate"])
def test_large_number_or_text_in_an_attrs_object_is_refused(inner):
    kind = pytest.importorskip("attrs").make_class("Attributes", ["a"])
    with pytest.raises(InvalidTypeError, match=r"field 'f': .* msgspec\.Struct, an attrs object"):
        stored([kind(inner)])
    assert stored([kind(1), inner]) == [{"a": 1}, inner]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8, torch.bool], ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3)], ids=str)
def test_tensors_inside_values_keep_dtype_and_shape(dtype, shape):
    tensor = torch.ones(shape).to(dtype)
    [copied] = stored([tensor])
    assert copied.dtype == dtype
    assert copied.shape == tensor.shape
    assert torch.equal(copied, tensor)


def test_arrays_inside_values_come_back_writable():
    copied = stored({"a": np.arange(6, dtype=np.int16).reshape(2, 3)})
    copied["a"] += 1
    assert copied["a"].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert copied["a"].dtype == np.int16


def test_numpy_scalars_become_python_numbers():
    assert stored([np.int64(3), np.float32(0.5), np.bool_(True)]) == [3, 0.5, True]


@pytest.mark.parametrize(
    "value",
    [
        object(),
        np.array([object()]),
        np.longdouble(1),
        np.zeros(1, [("x", "f4")])[0],
        np.datetime64(1, "ns"),
        np.timedelta64(1, "s"),
        torch.nested.nested_tensor_from_jagged(torch.ones(0, 2), torch.tensor([0])),
    ],
    ids=[
        "an object",
        "an array of objects",
        "a number type that Python lacks",
        "a record",
        "a date of numpy",
        "a duration of numpy",
        "no rows",
    ],
)
def test_value_that_cannot_be_stored_names_its_field(value):
    with pytest.raises(InvalidRequestError, match="field 'f'"):
        stored([value])


@pytest.mark.parametrize(
    ("array", "named"),
    [
        (np.zeros(2, [("x", "f4"), ("y", "i8")]), r"ndarray of dtype \[\('x', '<f4'\)"),
        (np.zeros(2, "V2"), r"ndarray of dtype \|V2"),
        (np.ma.masked_array([1, 2], [True, False]), "MaskedArray of dtype int64"),
        (np.rec.array([(1, 2.0)]), "recarray of dtype"),
        (np.zeros(2, np.int64).view(Image), "Image of dtype int64"),
    ],
    ids=["records", "bytes without a meaning", "masked", "a record array", "a subclass"],
)
def test_array_that_would_decode_differently_is_refused(array, named):
    with pytest.raises(InvalidRequestError, match=f"field 'f': {named}.* cannot be stored"):
        stored({"a": [array]})


@pytest.mark.parametrize("dtype", [">i4", "<U3", "S2", "M8[ns]", "m8[s]", "c8", "f2", "?"])
def test_arrays_of_plain_dtypes_come_back_as_they_were(dtype):
    array = np.array([0, 1, 0]).astype(dtype)
    [copied] = stored([array])
    assert copied.dtype == array.dtype
    assert copied.tolist() == array.tolist()


def test_an_array_in_a_file_comes_back_as_an_array(tmp_path):
    np.arange(6).tofile(tmp_path / "numbers")
    mapped = np.memmap(tmp_path / "numbers", dtype=np.int64, mode="r")
    [copied] = stored([mapped])
    assert type(copied) is np.ndarray
    assert copied.tolist() == list(range(6))


@pytest.mark.parametrize("value", [1 - 2.5j, slice(1, None, 3)], ids=["complex", "slice"])
def test_python_values_beyond_json_come_back_equal(value):
    assert stored({"a": [value]}) == {"a": [value]}


def test_values_nest_up_to_500_levels():
    value = 1
    for _ in range(500):
        value = [value]
    assert stored(value) == value
    for deeper in ([value], {1: value}, (value,)):
        with pytest.raises(InvalidRequestError, match=r"field 'f': .*more than 500 nested levels"):
            stored(deeper)
    with pytest.raises(ValueError, match="nested too deeply"):
        decode_object(b"\x91" * 100_000 + b"\x01")


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
def test_nested_tensors_inside_values_keep_their_rows(layout):
    rows = [torch.arange(3), torch.arange(1)]
    copied = stored({"a": torch.nested.as_nested_tensor(rows, layout=layout)})["a"]
    assert copied.layout == layout
    assert [row.tolist() for row in copied.unbind()] == [[0, 1, 2], [0]]


def test_nested_tensors_keep_the_dimension_that_differs():
    rows = [torch.ones(2, 4, dtype=torch.bfloat16)] * 2
    nested = torch.nested.as_nested_tensor(rows, layout=torch.jagged).transpose(1, 2)
    copied = stored([nested])[0]
    assert torch.equal(copied.offsets(), nested.offsets())
    assert torch.equal(copied.values(), nested.values())


IMAGE_MODES = (
    *("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB"),
    *("HSV", "I", "F", "I;16", "I;16L", "I;16B", "I;16N"),
)


def opened(image, form, **options):
    """Return an image as Pillow opens its encoded form."""
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return pytest.importorskip("PIL.Image").open(buffer)


@pytest.mark.parametrize("mode", IMAGE_MODES)
def test_images_come_back_as_from_pickle(mode):
    images = pytest.importorskip("PIL.Image")
    blank = images.new(mode, (5, 3))
    image = images.frombytes(mode, (5, 3), bytes(range(len(blank.tobytes()))))
    if mode in ("P", "PA"):
        image.putpalette(bytes(range(255, -1, -1)) * 3)
    image.info = {"exif": b"Exif", "dpi": (72, 72.5), "photoshop": {1: b"", 2: [(1,)]}, "s": {3}}
    (copied,) = stored({"images": [image]})["images"]
    for expected in (image, pickle.loads(pickle.dumps(image))):
        assert copied == expected  # mode, size, info, palette and pixels
        assert type(copied.info["dpi"]) is tuple


def test_images_of_files_keep_what_their_files_say():
    images, ops = pytest.importorskip("PIL.Image"), pytest.importorskip("PIL.ImageOps")
    orientation = images.Exif()
    orientation[0x112] = 6
    turned = opened(images.new("RGB", (4, 2)), "JPEG", exif=orientation)
    drawing = images.effect_noise((5, 3), 90).convert("P")
    drawing.putpalette(bytes(range(256)) * 4, "RGBA")
    clear = opened(drawing.convert("P"), "GIF", transparency=drawing.getpixel((0, 0)))
    copied = stored([turned, drawing, clear])
    assert ops.exif_transpose(copied[0]).size == (2, 4)
    assert copied[0].format == "JPEG"
    for image, copy in zip([turned, drawing, clear], copied, strict=True):
        assert copy.info == image.info
        assert copy.convert("RGBA").tobytes() == image.convert("RGBA").tobytes()


def test_image_of_several_frames_is_refused():
    images = pytest.importorskip("PIL.Image")
    frames = [images.new("L", (2, 2), shade) for shade in (0, 99)]
    animated = opened(frames[0], "GIF", save_all=True, append_images=frames[1:])
    with pytest.raises(InvalidRequestError, match="field 'f': an image of 2 frames"):
        stored([animated])
    with pytest.raises(InvalidRequestError, match="2 frames"):  # pickle keeps one, too
        encode_object("value", animated, allow_pickle=True)
    assert stored([animated.copy()])[0].getpixel((0, 0)) == 0


def test_stored_image_cannot_allocate_more_than_its_pixels_need():
    image = pytest.importorskip("PIL.Image").new("1", (64, 3))
    data = encode_object("value", image)
    forged = data.replace(b"\x92\x40\x03", b"\x92\x40\x7f")
    assert decode_object(data) == image
    with pytest.raises(ValueError, match="24 bytes are too few for 64 x 127 pixels"):
        decode_object(forged)


@pytest.mark.slow  # the workspace has transformers
def test_features_of_transformers_keep_their_tensors():
    transformers = pytest.importorskip("transformers")
    features = transformers.BatchFeature({"pixel_values": torch.ones(2, 3)})
    copied = stored([features])[0]
    assert type(copied) is transformers.BatchFeature
    assert torch.equal(copied["pixel_values"], torch.ones(2, 3))
    with pytest.raises(InvalidRequestError, match="Mixed cannot be stored"):
        stored([type("Mixed", (transformers.BatchFeature,), {})({})])


@pytest.mark.slow  # the workspace has transformers
def test_tokens_of_transformers_keep_their_offsets():
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({"two": 0, "plus": 1}, unk_token="two")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    tokens = fast(["two plus two", "plus"])
    copied = stored([tokens])[0]
    assert copied.data == tokens.data
    assert copied.char_to_token(0, 4) == tokens.char_to_token(0, 4) == 1
    assert copied.word_ids(1) == tokens.word_ids(1) == [0]


def test_pydantic_models_come_back_as_models():
    for name in ("Message", "Unknown.Message"):
        message_type = make_message_type(name)
        message = message_type(role="user", content="2 + 2")
        (copied,) = stored([message])
        assert copied == message
        assert copied.model_fields_set == {"role", "content"}
        (copied,) = stored([message_type(role="user")])
        assert copied.model_fields_set == {"role"}


def test_pydantic_model_that_json_would_change_is_refused():
    pydantic = pytest.importorskip("pydantic")
    base = make_message_type("Message")
    anything = {"x": (object, ...)}
    for name, fields, value, difference in (
        ("Secret", {"x": (pydantic.SecretStr, ...)}, "s", "'x' changes its value"),
        ("Excluded", {"x": (int, pydantic.Field(0, exclude=True))}, 1, "'x' changes its value"),
        ("Sequence", anything, (1, 2), "'x' changes from tuple to list"),
        ("Choice", anything, [{"a": Role.USER}], """"x[0]['a']" changes from Role to str"""),
        ("Count", anything, Level.LOW, "'x' changes from Level to int"),
        ("Keys", anything, {1: "a"}, """"x's keys[0]" changes from int to str"""),
        ("Nested", anything, base(role="user"), "'x' changes from Message to dict"),
        ("Missing", {"x": (float | None, ...)}, math.nan, "'x' changes from float to NoneType"),
        ("Number", {"x": (float, ...)}, math.inf, "valid number"),
    ):
        model = pydantic.create_model(name, __module__=__name__, **fields)
        globals()[name] = model
        with pytest.raises(InvalidRequestError) as raised:
            stored([model(x=value)])
        assert f":{name}' cannot be restored from its JSON: " in str(raised.value)
        assert difference in str(raised.value)
    unknown = pydantic.create_model("Local", __module__=__name__, __base__=base)(role="user")
    with pytest.raises(InvalidRequestError, match=r"Local.*has not imported"):
        stored([unknown])
    aliased = pydantic.create_model(
        "Aliased", __module__=__name__, x=(int, pydantic.Field(alias="y"))
    )
    globals()["Aliased"] = aliased
    assert stored([aliased(y=1)]) == [aliased(y=1)]


def test_pydantic_model_whose_json_has_nan_comes_back():
    pydantic = pytest.importorskip("pydantic")
    config = pydantic.ConfigDict(ser_json_inf_nan="constants")
    model = pydantic.create_model("Score", __module__=__name__, __config__=config, x=(float, ...))
    globals()["Score"] = model
    infinite, missing = stored([model(x=-math.inf), model(x=math.nan)])
    assert infinite == model(x=-math.inf)
    assert math.isnan(missing.x)


def make_message_type(qualified_name):
    pydantic = pytest.importorskip("pydantic")
    message_type = pydantic.create_model(
        "Message", __module__=__name__, role=(str, ...), content=(str, "")
    )
    message_type.__qualname__ = qualified_name
    owner = Unknown if "." in qualified_name else sys.modules[__name__]
    owner.Message = message_type
    return message_type


def test_stored_name_of_a_model_imports_nothing():
    """A stored path must not run the code of a module that the reader has not imported."""
    data = encode_object("value", make_message_type("Message")(role="user", content=""))
    forged = data.replace(
        __name__.encode() + b":Message", b"this:Me".ljust(len(__name__) + 8, b"s")
    )
    reader = (
        "import sys; from dataplane_core.tensors.object_codec import decode_object\n"
        f"try: decode_object({forged!r})\n"
        "except ValueError as error: print(error, 'this' in sys.modules)"
    )
    printed = subprocess.run(
        [sys.executable, "-c", reader], capture_output=True, text=True, check=True, timeout=120
    ).stdout
    assert "has not imported" in printed
    assert printed.endswith("False\n")


class Point:
    """Type that core has no codec for."""

    def __init__(self, x):
        self.x = x


class Pixel(Point):
    """Subclass of a registered type."""


def test_registered_types_and_their_subclasses_are_stored():
    register_object_type("tests.Point", Point, lambda point: [point.x], lambda x: Point(*x))
    copied = stored({"a": [Point(torch.ones(2)), Pixel(3)]})["a"]
    assert [type(point) for point in copied] == [Point, Point]
    assert torch.equal(copied[0].x, torch.ones(2))
    assert copied[1].x == 3


def test_name_of_another_type_cannot_be_registered():
    with pytest.raises(ValueError, match="'complex' is registered for another type"):
        register_object_type("complex", Pixel, repr, Pixel)


class Unknown:
    """Type that only pickle can store."""

    def __eq__(self, other):
        return type(other) is Unknown

    __hash__ = None


def test_pickle_is_written_and_read_only_where_it_is_allowed():
    with pytest.raises(InvalidRequestError, match="Unknown cannot be stored"):
        encode_object("a value", {"a": Unknown()})
    data = encode_object("a value", {"a": Unknown(), "b": 1j}, allow_pickle=True)
    assert decode_object(data, allow_pickle=True) == {"a": Unknown(), "b": 1j}
    with pytest.raises(ValueError, match="allow_pickle only if you trust every process"):
        decode_object(data)
