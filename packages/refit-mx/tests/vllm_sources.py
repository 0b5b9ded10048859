"""The Python sources of a released vLLM, read from its wheel without installing or importing it."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath

DOWNLOAD_S = 600.0
HTTP_METHODS = ("get", "post", "put", "delete", "patch")


@dataclass(frozen=True)
class Route:
    """One HTTP route.

    Attributes:
        method: HTTP method in upper case.
        body: whether each key of the JSON body is required; empty if no body is read.
        query: names of the query parameters.
        answers: keys of the JSON objects in its answers.
    """

    method: str
    body: Mapping[str, bool]
    query: frozenset[str]
    answers: frozenset[str]


@dataclass
class VllmSources:
    """Modules of one version of vLLM.

    Attributes:
        version: version of the distribution.
        texts: module texts by path below the wheel's root, such as ``vllm/version.py``.
    """

    version: str
    texts: Mapping[str, str] = field(repr=False)
    _trees: dict[str, ast.Module] = field(default_factory=dict, repr=False)

    def with_change(self, path: str, old: str, new: str) -> VllmSources:
        """Return a copy in which a text of one module is replaced."""
        texts = {**self.texts, path: self.texts[path].replace(old, new)}
        return VllmSources(self.version, texts, {p: t for p, t in self._trees.items() if p != path})

    def is_since(self, minor: str) -> bool:
        """Return whether this version has a minor version, such as ``0.27``, or a later one."""
        this, other = (each.split(".")[:2] for each in (self.version, minor))
        return [int(part) for part in this] >= [int(part) for part in other]

    def tree(self, path: str) -> ast.Module:
        if path not in self._trees:
            self._trees[path] = ast.parse(self.texts[path])
        return self._trees[path]

    def module_path(self, module: str) -> str | None:
        """Return the path of a dotted module; None if it is missing."""
        base = module.replace(".", "/")
        return next((p for p in (f"{base}.py", f"{base}/__init__.py") if p in self.texts), None)

    def has_name(self, module: str, name: str) -> bool:
        """Return whether ``from module import name`` works: defined, imported, or a submodule."""
        path = self.module_path(module)
        if path is None:
            return False
        return name in _bound(self.tree(path)) or self.module_path(f"{module}.{name}") is not None

    def find(self, module: str, qualname: str) -> ast.AST | None:
        """Return a function, class, or method by ``Class.method``; None if it is missing."""
        path = self.module_path(module)
        node: ast.AST | None = None if path is None else self.tree(path)
        for part in qualname.split("."):
            body = getattr(node, "body", ())
            node = next((n for n in body if getattr(n, "name", None) == part), None)
        return node

    def parameters(self, module: str, qualname: str) -> list[str] | None:
        """Return the names of a function's parameters, those with a default followed by ``=``."""
        function = self.find(module, qualname)
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            return None
        arguments = function.args
        positional = [*arguments.posonlyargs, *arguments.args]
        without = len(positional) - len(arguments.defaults)
        names = [a.arg + "=" * (i >= without) for i, a in enumerate(positional)]
        names += [f"*{arguments.vararg.arg}"] if arguments.vararg else []
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
            names.append(argument.arg + "=" * (default is not None))
        return names + ([f"**{arguments.kwarg.arg}"] if arguments.kwarg else [])

    def abstract_methods(self, module: str, name: str) -> set[str]:
        node = self.find(module, name)
        return {
            function.name
            for function in getattr(node, "body", ())
            if isinstance(function, ast.FunctionDef)
            and any("abstractmethod" in ast.unparse(d) for d in function.decorator_list)
        }

    def fields(self, module: str, name: str) -> set[str]:
        """Return the names that the body of a class annotates or assigns."""
        return _bound(self.find(module, name))

    @cached_property
    def routes(self) -> Mapping[str, Route]:
        """All routes below ``vllm/entrypoints``, by path."""
        routes = {}
        for path, text in self.texts.items():
            if path.startswith("vllm/entrypoints/") and "@router." in text:
                routes.update(_routes(self.tree(path)))
        return routes


def vllm_sources(minor: str, cache: Path) -> VllmSources:
    """Read the newest patch of a minor version, from the cache or from the package index.

    Only the Python files of a wheel are stored: about 8 of its 300 MB.

    Args:
        minor: minor version, such as ``0.32``.
        cache: folder of the cache, created if missing.
    """
    archive = cache / f"vllm-{minor}-sources.zip"
    if not archive.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            subprocess.run(
                [*_pip(cache), "download", "--quiet", "--no-deps", "--no-cache-dir",
                 "--only-binary=:all:", "--dest", folder, f"vllm=={minor}.*"],
                check=True, timeout=DOWNLOAD_S,
            )  # fmt: skip
            (wheel,) = Path(folder).glob("*.whl")
            sources = Path(folder) / "sources.zip"
            _keep_sources(wheel, sources)
            sources.replace(archive)
    with zipfile.ZipFile(archive) as opened:
        texts = {n: opened.read(n).decode() for n in opened.namelist()}
    return VllmSources(texts.pop("version"), texts)


def _keep_sources(wheel: Path, kept: Path) -> None:
    with (
        zipfile.ZipFile(wheel) as source,
        zipfile.ZipFile(kept, "w", zipfile.ZIP_DEFLATED) as target,
    ):
        target.writestr("version", wheel.name.split("-")[1])
        for name in source.namelist():
            if PurePosixPath(name).suffix == ".py" and name.startswith("vllm/"):
                target.writestr(name, source.read(name))


def _pip(cache: Path) -> list[str]:
    """Return the command of pip: this environment's, else that of one made for it."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    program = cache / "pip-environment" / "bin" / "python"
    if not program.exists():
        venv.create(program.parents[1], with_pip=True)
    return [str(program), "-m", "pip"]


def _bound(node: ast.AST | None) -> set[str]:
    """Return the names that the body of a module or class binds, also below `if` and `try`."""
    names: set[str] = set()
    for child in _statements(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(child.name)
        elif isinstance(child, ast.Import | ast.ImportFrom):
            names.update((a.asname or a.name).partition(".")[0] for a in child.names)
        elif isinstance(child, ast.Assign | ast.AnnAssign):
            targets = child.targets if isinstance(child, ast.Assign) else [child.target]
            names.update(n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name))
    return names


def _statements(node: ast.AST | None) -> Iterator[ast.stmt]:
    for child in getattr(node, "body", ()):
        yield child
        if isinstance(child, ast.If | ast.Try | ast.With):
            for block in (child, *getattr(child, "handlers", ())):
                yield from _statements(block)
            yield from _statements(ast.Module(body=getattr(child, "orelse", []), type_ignores=[]))


def _routes(tree: ast.Module) -> Iterator[tuple[str, Route]]:
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for decorator in function.decorator_list:
            if (
                isinstance(decorator, ast.Call)
                and isinstance(decorator.func, ast.Attribute)
                and decorator.func.attr in HTTP_METHODS
                and decorator.args
                and isinstance(decorator.args[0], ast.Constant)
            ):
                body, query = _inputs(function)
                yield (
                    decorator.args[0].value,
                    Route(decorator.func.attr.upper(), body, query, _answers(function)),
                )


def _inputs(
    function: ast.FunctionDef | ast.AsyncFunctionDef,
) -> tuple[dict[str, bool], frozenset[str]]:
    """Return keys of the body and names of the query, as declared or read from the request."""
    body, query = {}, set()
    arguments = function.args.args
    without = len(arguments) - len(function.args.defaults)
    for index, argument in enumerate(arguments):
        default = function.args.defaults[index - without] if index >= without else None
        annotation = "" if argument.annotation is None else ast.unparse(argument.annotation)
        if "Body(" in annotation:
            body[argument.arg] = default is None
        elif "Query(" in annotation or (default is not None and "Query(" in ast.unparse(default)):
            query.add(argument.arg)
    for call in ast.walk(function):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "body.get":
            key = ast.literal_eval(call.args[0])
            body[key] = f"Missing '{key}' in request body" in ast.unparse(function)
    return body, frozenset(query)


def _answers(function: ast.AST) -> frozenset[str]:
    """Return the keys of the function's dict literals; each of its answers is one."""
    keys = (key for node in ast.walk(function) if isinstance(node, ast.Dict) for key in node.keys)
    return frozenset(k.value for k in keys if isinstance(k, ast.Constant))
