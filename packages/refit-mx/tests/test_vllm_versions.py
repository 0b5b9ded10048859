"""Every supported vLLM has the names and behavior that refit-mx relies on.

Each version's wheel is downloaded without its dependencies (300 MB each; about 8 MB of Python files
are stored) into the folder named by ``REFIT_MX_VLLM_SOURCES``, else into pytest's cache. The
sources are parsed, never imported. Expectations are declared here. Imports of vLLM and routes that
the fleet calls are read from refit-mx's own sources. Imports internals: the name of the engine is
compared with vLLM's list.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeGuard

import pytest
from vllm_sources import VllmSources, vllm_sources

import refit_mx

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]

VERSIONS = ("0.25", "0.26", "0.27", "0.28", "0.29", "0.30", "0.31", "0.32", "0.33")
PACKAGE = Path(refit_mx.__file__).parent
TRANSFER = "vllm.distributed.weight_transfer"
RELOAD = "vllm.model_executor.model_loader.reload"
WORKER = "vllm.v1.worker.gpu_worker"
ENGINE = "MxWeightTransferEngine"
BASE = "WeightTransferEngine"


@dataclass(frozen=True)
class Expected:
    """A function of vLLM by its parameters, those with a default followed by ``=``."""

    module: str
    qualname: str
    parameters: tuple[str, ...]

    def problems(self, sources: VllmSources) -> Iterator[str]:
        parameters = sources.parameters(self.module, self.qualname)
        if parameters is None:
            yield f"{self.module}: no function {self.qualname}"
        elif tuple(parameters) != self.parameters:
            yield f"{self.module}.{self.qualname}: {parameters}; expected {list(self.parameters)}"


@dataclass(frozen=True)
class ExpectedRoute:
    """A route that the fleet calls.

    Attributes:
        body: keys that the route reads; before ``body_since`` it reads none.
        required: keys without which the route answers 400.
        query: parameters that the route must accept.
        answers: keys that are read.
        since: first version that has the route; it must be missing before.
        body_since: first version that reads the body.
    """

    method: str
    path: str
    body: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    query: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()
    since: str = VERSIONS[0]
    body_since: str = VERSIONS[0]

    def problems(self, sources: VllmSources) -> Iterator[str]:
        route = sources.routes.get(self.path)
        expected = sources.is_since(self.since)
        if route is None or not expected:
            if (route is not None) != expected:
                yield f"{self.path}: is {'missing' if expected else 'there before ' + self.since}"
            return
        if route.method != self.method:
            yield f"{self.path}: {route.method}; expected {self.method}"
        sent = self.body if sources.is_since(self.body_since) else ()
        if set(route.body) != set(sent):
            yield f"{self.path}: body keys {sorted(route.body)}; expected {sorted(sent)}"
        required = {key for key, needed in route.body.items() if needed}
        if required != set(self.required):
            yield f"{self.path}: requires {sorted(required)}; expected {sorted(self.required)}"
        if unknown := set(self.query) - route.query:
            yield f"{self.path}: no query parameter {sorted(unknown)}; found {sorted(route.query)}"
        if unread := set(self.answers) - route.answers:
            yield f"{self.path}: answers lack {sorted(unread)}; found {sorted(route.answers)}"


FUNCTIONS = (
    Expected(
        f"{TRANSFER}.base", f"{BASE}.__init__", ("self", "config", "vllm_config", "device", "model")
    ),
    Expected(f"{TRANSFER}.base", f"{BASE}.init_transfer_engine", ("self", "init_info")),
    Expected(f"{TRANSFER}.base", f"{BASE}.start_weight_update", ("self",)),
    Expected(f"{TRANSFER}.base", f"{BASE}.update_weights", ("self", "update_info")),
    Expected(f"{TRANSFER}.base", f"{BASE}.receive_weights", ("self", "update_info")),
    Expected(f"{TRANSFER}.base", f"{BASE}.finish_weight_update", ("self",)),
    Expected(f"{TRANSFER}.base", f"{BASE}.shutdown", ("self",)),
    Expected(f"{TRANSFER}.base", f"{BASE}.parse_init_info", ("self", "init_dict")),
    Expected(f"{TRANSFER}.base", f"{BASE}.parse_update_info", ("self", "update_dict")),
    Expected(
        f"{TRANSFER}.factory",
        "WeightTransferEngineFactory.register_engine",
        ("cls", "name", "module_path_or_cls", "class_name="),
    ),
    Expected(
        f"{TRANSFER}.factory",
        "WeightTransferEngineFactory.create_engine",
        ("cls", "config", "vllm_config", "device", "model"),
    ),
    Expected(WORKER, "Worker.init_weight_transfer_engine", ("self", "init_info")),
    Expected(WORKER, "Worker.start_weight_update", ("self",)),
    Expected(WORKER, "Worker.update_weights", ("self", "update_info")),
    Expected(WORKER, "Worker.finish_weight_update", ("self",)),
    Expected(f"{RELOAD}.layerwise", "record_metadata_for_reloading", ("model",)),
    Expected(f"{RELOAD}.layerwise", "initialize_layerwise_reload", ("model",)),
    Expected(f"{RELOAD}.layerwise", "finalize_layerwise_reload", ("*args", "**kwargs")),
    Expected(f"{RELOAD}.layerwise", "finalize_layerwise_processing", ("model", "model_config")),
    Expected(f"{RELOAD}.layerwise", "get_layerwise_info", ("layer",)),
    Expected(f"{RELOAD}.layerwise", "_get_original_loader", ("tensor",)),
    Expected(f"{RELOAD}.layerwise", "_layerwise_process", ("layer", "info")),
    Expected(f"{RELOAD}.layerwise", "_place_kernel_tensors", ("layer", "info")),
    Expected(f"{RELOAD}.meta", "materialize_layer", ("layer", "info")),
    Expected(f"{RELOAD}.types", "LayerReloadingInfo.reset", ("self",)),
    Expected(f"{RELOAD}.types", "LayerReloadingInfo.can_load", ("self",)),
    Expected(f"{RELOAD}.utils", "get_layer_tensors", ("layer",)),
)
ROUTES = (
    ExpectedRoute("GET", "/version", answers=("version",)),
    ExpectedRoute("POST", "/pause", query=("mode", "clear_cache")),
    ExpectedRoute("POST", "/resume"),
    ExpectedRoute("GET", "/is_paused", answers=("is_paused",)),
    ExpectedRoute("GET", "/get_world_size", query=("include_dp",), answers=("world_size",)),
    ExpectedRoute(
        "POST", "/init_weight_transfer_engine", body=("init_info",), required=("init_info",)
    ),
    ExpectedRoute(
        "POST",
        "/collective_rpc",
        body=("method", "args", "kwargs", "timeout"),
        required=("method",),
        answers=("results",),
    ),
    ExpectedRoute("POST", "/start_weight_update"),
    ExpectedRoute("POST", "/update_weights", body=("update_info",), required=("update_info",)),
    ExpectedRoute("POST", "/finish_weight_update", body=("weight_version",), body_since="0.27"),
    ExpectedRoute(
        "POST",
        "/update_weight_version",
        body=("new_version",),
        required=("new_version",),
        since="0.27",
    ),
    ExpectedRoute("GET", "/weight_info", answers=("weight_version",), since="0.27"),
)
FIELDS = (
    (f"{RELOAD}.types", "LayerReloadingInfo", {"restore_metadata", "kernel_tensors", "load_numel"}),
    (f"{TRANSFER}.base", BASE, {"init_info_cls", "update_info_cls"}),
    ("vllm.model_executor.models.utils", "WeightsMapper", {"orig_to_new_stacked"}),
    ("vllm.config.parallel", "ParallelConfig", {"rank", "worker_extension_cls"}),
    ("vllm.distributed.parallel_state", "GroupCoordinator", {"cpu_group", "world_size"}),
)
CLASSES = (
    ("vllm.model_executor.layers.fused_moe.routed_experts", "RoutedExperts"),
    ("vllm.model_executor.layers.linear", "UnquantizedLinearMethod"),
    ("vllm.model_executor.layers.vocab_parallel_embedding", "UnquantizedEmbeddingMethod"),
    ("vllm.model_executor.layers.vocab_parallel_embedding", "VocabParallelEmbedding"),
)


@pytest.fixture(scope="module", params=VERSIONS)
def sources(request: pytest.FixtureRequest) -> VllmSources:
    named = os.environ.get("REFIT_MX_VLLM_SOURCES")
    return vllm_sources(
        request.param, Path(named) if named else request.config.cache.mkdir("vllm-sources")
    )


def test_supported_vllm_meets_all_expectations(sources: VllmSources) -> None:
    assert not list(problems(sources)), f"vLLM {sources.version}"


@pytest.mark.parametrize(
    ("path", "old", "new", "reported"),
    [
        (f"{TRANSFER}.base", "def shutdown(self)", "def shutdown(self, wait)", "shutdown: ['self'"),
        (f"{TRANSFER}.base", "    @abstractmethod\n    def shutdown", "    @abstractmethod\n"
         "    def drain(self): ...\n    @abstractmethod\n    def shutdown", "abstract drain"),
        (f"{TRANSFER}.factory", '    "nccl",', '    "mx",', "'mx' is taken"),
        ("vllm.config.weight_transfer", "] | str", "]", "any name"),
        (WORKER, "_weight_update_active", "_update_session", "_weight_update_active"),
        (f"{RELOAD}.layerwise", "_place_kernel_tensors(layer: ", "_place_kernel_tensors(module: ",
         "_place_kernel_tensors: ['module'"),
        (f"{RELOAD}.layerwise", "def initialize_layerwise_reload(", "def initialize_reload(",
         "initialize_layerwise_reload"),
        (f"{RELOAD}.types", "kernel_tensors", "runtime_tensors", "lacks kernel_tensors"),
        (f"{TRANSFER}.factory", "class WeightTransferEngineFactory", "class Engines",
         "imports WeightTransferEngineFactory"),
        ("vllm.model_executor.layers.linear", "class UnquantizedLinearMethod(",
         "class PlainLinearMethod(", "no class UnquantizedLinearMethod"),
        ("vllm.model_executor.models.utils", "orig_to_new_stacked", "stacked", "orig_to_new_"),
        ("routes", "/start_weight_update", "/begin_weight_update", "/start_weight_update: is m"),
        ("routes", "init_info", "init", "/init_weight_transfer_engine: body keys ['init']"),
        ("routes", '"is_paused":', '"paused":', "/is_paused: answers lack ['is_paused']"),
        ("routes", "clear_cache:", "keep_cache:", "/pause: no query parameter ['clear_cache']"),
    ],
    ids=lambda value: value.partition(".")[2].rpartition(".")[2] if "vllm." in value else None,
)  # fmt: skip
def test_change_of_vllm_is_reported(
    sources: VllmSources, path: str, old: str, new: str, reported: str
) -> None:
    if path == "routes":
        file = next(p for p, t in sources.texts.items() if '@router.post("/start_weight_' in t)
    else:
        file = sources.module_path(path)
    assert old in sources.texts[file], f"vLLM {sources.version} writes it in another way"
    changed = sources.with_change(file, old, new)
    assert any(reported in problem for problem in problems(changed)), list(problems(changed))


@pytest.mark.parametrize("index", range(len(FUNCTIONS)))
def test_wrong_expectation_of_a_function_is_reported(sources: VllmSources, index: int) -> None:
    expected = replace(FUNCTIONS[index], parameters=(*FUNCTIONS[index].parameters, "more"))
    assert list(expected.problems(sources))


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path)
def test_wrong_expectation_of_a_route_is_reported(
    sources: VllmSources, route: ExpectedRoute
) -> None:
    wrong = [
        replace(route, since="0.99"),
        replace(route, path=f"{route.path}_more"),
        replace(route, method="PUT"),
        replace(route, body=(*route.body, "more"), body_since=VERSIONS[0]),
        replace(route, query=("more",)),
        replace(route, answers=("more",)),
    ]
    if sources.is_since(route.since):
        assert all(list(each.problems(sources)) for each in wrong)


def problems(sources: VllmSources) -> Iterator[str]:
    """Describe each thing that is not as expected."""
    for expected in (*FUNCTIONS, *ROUTES):
        yield from expected.problems(sources)
    for module, name, fields in FIELDS:
        if missing := fields - sources.fields(module, name):
            yield f"{module}.{name}: lacks {', '.join(sorted(missing))}"
    for module, name in CLASSES:
        if not isinstance(sources.find(module, name), ast.ClassDef):
            yield f"{module}: no class {name}"
    yield from _import_problems(sources)
    yield from _method_problems(sources)
    yield from _engine_problems(sources)
    yield from _backend_problems(sources)
    yield from _session_problems(sources)
    yield from _fleet_problems()


def _import_problems(sources: VllmSources) -> Iterator[str]:
    """Describe each missing import from vLLM; an ImportError may have a fallback."""
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        tries = [node for node in ast.walk(tree) if isinstance(node, ast.Try) and node.handlers]
        tried = {id(node) for each in tries for node in ast.walk(each)}
        missing = [m for n in ast.walk(tree) if id(n) not in tried for m in _missing(sources, n)]
        for each in tries:
            body, handlers = (
                [m for part in parts for n in ast.walk(part) for m in _missing(sources, n)]
                for parts in (each.body, each.handlers)
            )
            catches = any("ImportError" in ast.unparse(h.type or h) for h in each.handlers)
            missing += handlers if body and catches else body
        yield from (f"{path.name} imports {each}" for each in missing)


def _missing(sources: VllmSources, node: ast.AST) -> Iterator[str]:
    """Describe each name of vLLM that an import statement does not find."""
    if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
        for alias in node.names:
            if not sources.has_name(node.module or "", alias.name):
                yield f"{alias.name} of {node.module}, which lacks it"


def _method_problems(sources: VllmSources) -> Iterator[str]:
    """Describe each quantization method of the engine that is no class of this version."""
    known: set[str] = set()
    for path in sorted((PACKAGE / "engine").rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            target = getattr(node, "target", None) or next(iter(getattr(node, "targets", ())), None)
            if isinstance(target, ast.Name) and target.id.startswith("REPEATABLE"):
                known.update(n.value for n in ast.walk(node) if isinstance(n, ast.Constant))
    layers = [t for p, t in sources.texts.items() if p.startswith("vllm/model_executor/layers/")]
    for name in sorted(known):
        if not any(f"\nclass {name}(" in text for text in layers):
            yield f"no layer method {name}"


def _engine_problems(sources: VllmSources) -> Iterator[str]:
    """Check that the engine defines each abstract method."""
    (engine,) = (
        node
        for node in ast.parse((PACKAGE / "engine" / "vllm.py").read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == ENGINE
    )
    defined = {node.name for node in engine.body if isinstance(node, ast.FunctionDef)}
    for name in sorted(sources.abstract_methods(f"{TRANSFER}.base", BASE) - defined):
        yield f"{ENGINE} lacks the abstract {name}"


def _backend_problems(sources: VllmSources) -> Iterator[str]:
    """Check that vLLM allows any backend name, has no ``mx``, and loads plug-ins."""
    from refit_mx.engine.registration import BACKEND

    registered = [
        node.args[0].value
        for node in ast.walk(sources.tree(sources.module_path(f"{TRANSFER}.factory") or ""))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "WeightTransferEngineFactory.register_engine"
        and isinstance(node.args[0], ast.Constant)
    ]
    if not registered or BACKEND in registered:
        yield f"backend {BACKEND!r} is taken: {registered}"
    config = sources.find("vllm.config.weight_transfer", "WeightTransferConfig")
    types = [
        ast.unparse(node.annotation)
        for node in getattr(config, "body", ())
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "backend"
    ]
    if not any(each.endswith("| str") for each in types):
        yield f"WeightTransferConfig.backend: {types}; expected any name to be allowed"
    plugins = sources.module_path("vllm.plugins")
    if plugins is None or "vllm.general_plugins" not in sources.texts[plugins]:
        yield "vllm.plugins: no entry points vllm.general_plugins"


def _session_problems(sources: VllmSources) -> Iterator[str]:
    """Check vLLM's session: updates need one, a failed update ends it, a failed finish does not."""
    flag = "self._weight_update_active"
    texts = {
        name: ast.unparse(method)
        for name in ("update_weights", "finish_weight_update", "_start_weight_update",
                     "start_weight_update")
        if (method := sources.find(WORKER, f"Worker.{name}")) is not None
    }  # fmt: skip
    for name in ("update_weights", "finish_weight_update"):
        if f"if not {flag}:\n        raise RuntimeError" not in texts.get(name, ""):
            yield f"Worker.{name}: not refused without {flag}"
    start = texts.get("_start_weight_update", texts.get("start_weight_update", ""))
    if f"if {flag}:\n        raise RuntimeError" not in start:
        yield f"Worker.start_weight_update: not refused with {flag}"
    for name, ends in (("update_weights", True), ("finish_weight_update", False)):
        function = sources.find(WORKER, f"Worker.{name}")
        handlers = [
            ast.unparse(handler)
            for node in ast.walk(function or ast.Module(body=[], type_ignores=[]))
            if isinstance(node, ast.Try)
            for handler in node.handlers
        ]
        if any(f"{flag} = False" in handler for handler in handlers) != ends:
            yield f"Worker.{name}: {flag} {'outlives' if ends else 'does not outlive'} an error"


def _fleet_problems() -> Iterator[str]:
    """Check that `ROUTES` has each route of the fleet's client, with the keys that it sends."""
    declared = {route.path: set(route.body) for route in ROUTES}
    for path in sorted((PACKAGE / "fleet").rglob("*.py")):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if _is_path(node) and node.value not in declared:
                yield f"{path.name} calls {node.value}, which is not declared here"
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and any(_is_path(a) for a in call.args):
                route = next(a.value for a in call.args if _is_path(a))
                bodies = [argument for argument in call.args if isinstance(argument, ast.Dict)]
                keys = {k.value for b in bodies for k in b.keys if isinstance(k, ast.Constant)}
                if unknown := keys - declared.get(route, keys):
                    yield f"{path.name} sends {sorted(unknown)} to {route}"


def _is_path(node: ast.AST) -> TypeGuard[ast.Constant]:
    value = node.value if isinstance(node, ast.Constant) else None
    return isinstance(value, str) and value.startswith("/") and value[1:].isidentifier()
