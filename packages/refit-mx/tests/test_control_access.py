"""What a process trusts and brings: where a token may come from, and that nothing shows it."""

import pytest

from refit_mx.control import ControlAccess, ControlClient, EmbeddedControlServer
from refit_mx.errors import ControlAccessError, RefitConfigError, VersionNotFoundError

TOKEN = "0123456789abcdef-0123456789abcdef"
ELSEWHERE = "192.0.2.1:1"


@pytest.fixture
def server():
    with EmbeddedControlServer(token=TOKEN) as made:
        yield made


@pytest.fixture
def token_file(tmp_path):
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    return str(file)


def assert_let_in(access, server):
    with access.connect(server.address) as client, pytest.raises(VersionNotFoundError):
        client.get_version("x")


def test_a_token_comes_from_a_file(server, token_file):
    assert_let_in(ControlAccess(token_file=token_file), server)


def test_a_token_comes_from_an_environment_variable(server, monkeypatch):
    monkeypatch.setenv("OF_A_TEST", TOKEN)
    assert_let_in(ControlAccess(token_env="OF_A_TEST"), server)


@pytest.mark.parametrize("name", ["REFIT_MX_CONTROL_TOKEN", "REFIT_MX_CONTROL_TOKEN_FILE"])
def test_the_environment_says_where_the_token_is(server, token_file, monkeypatch, name):
    monkeypatch.setenv(name, token_file if name.endswith("FILE") else TOKEN)
    assert_let_in(ControlAccess.from_environment(), server)


def test_the_environment_says_whom_to_trust(monkeypatch):
    assert ControlAccess.from_environment() == ControlAccess()
    monkeypatch.setenv("REFIT_MX_CONTROL_TLS_CA", "ca.pem")
    monkeypatch.setenv("REFIT_MX_CONTROL_TLS_NAME", "refit.example")
    monkeypatch.setenv("REFIT_MX_CONTROL_TOKEN", "")
    assert ControlAccess.from_environment() == ControlAccess("ca.pem", "refit.example")


def test_a_wrong_token_is_an_error_that_a_retry_does_not_cure(server, monkeypatch):
    monkeypatch.setenv("OF_A_TEST", TOKEN + "-of-another")
    with (
        ControlAccess(token_env="OF_A_TEST").connect(server.address) as client,
        pytest.raises(ControlAccessError, match="a valid bearer token is required") as caught,
    ):
        client.get_version("x")
    assert not caught.value.retryable
    assert TOKEN not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"token_file": "a", "token_env": "B"}, "expected one of them"),
        ({"tls_name": "refit.example"}, "without tls_ca"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(arguments, named):
    with pytest.raises(RefitConfigError, match=named):
        ControlAccess(**arguments)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"token_file": "nowhere"}, "token file 'nowhere': No such file"),
        ({"token_env": "NOT_SET_BY_A_TEST"}, "NOT_SET_BY_A_TEST is not set"),
        ({"tls_ca": "nowhere"}, "tls_ca 'nowhere': No such file"),
        ({"tls_ca": __file__}, "no certificate in PEM"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(arguments, named):
    with pytest.raises(RefitConfigError, match=named):
        ControlAccess(**arguments).connect("127.0.0.1:1")


@pytest.mark.parametrize("text", ["", "short-secret", "two words-of-a-secret", "sécret" * 5])
@pytest.mark.parametrize("place", ["file", "env"])
def test_what_is_no_token_is_refused_and_not_shown(tmp_path, monkeypatch, place, text):
    file = tmp_path / "token"
    file.write_text(text)
    monkeypatch.setenv("OF_A_TEST", text)
    access = (
        ControlAccess(token_file=str(file))
        if place == "file"
        else ControlAccess(token_env="OF_A_TEST")
    )
    with pytest.raises(RefitConfigError, match=r"token.*(16 visible|not ASCII)") as caught:
        access.connect("127.0.0.1:1")
    assert not text or text not in str(caught.value)


@pytest.mark.parametrize("token", ["of\nsecrets", "sécrets", "of secrets"])
def test_a_token_that_no_header_carries_is_refused_and_not_shown(token, capfd):
    with pytest.raises(RefitConfigError, match="not visible ASCII") as caught:
        ControlClient("127.0.0.1:1", token=token)
    assert token not in str(caught.value) + "".join(capfd.readouterr())


def test_a_token_never_travels_in_the_clear(token_file):
    with pytest.raises(RefitConfigError, match="in the clear") as caught:
        ControlAccess(token_file=token_file).connect(ELSEWHERE)
    assert TOKEN not in str(caught.value)


@pytest.mark.parametrize(
    "address",
    [
        "127.evil.example.com:50051",
        "127.0.0.1.example.com:50051",
        "localhost.example.com:50051",
        "128.0.0.1:50051",
        "[::2]:50051",
        "::1:50051",
        "dns://example.com/127.0.0.1:50051",
    ],
)
def test_only_this_machine_is_given_a_token_in_the_clear(address):
    with pytest.raises(RefitConfigError, match="in the clear"):
        ControlClient(address, token=TOKEN)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.9.9.9:1", "localhost:1", "[::1]:1"])
def test_this_machine_is_given_a_token_without_tls(address):
    ControlClient(address, token=TOKEN).close()


def test_a_proxy_of_the_environment_is_not_asked(server, token_file, monkeypatch):
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert_let_in(ControlAccess(token_file=token_file), server)


def test_nothing_that_is_shown_has_the_token(server, token_file):
    access = ControlAccess(token_file=token_file)
    with access.connect(server.address) as client, client.another() as another:
        shown = [repr(each) for each in (access, client, another, client._connection)]
    assert not any(TOKEN in each for each in shown)
