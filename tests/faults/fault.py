"""A fault: an expression of one function of `megajax` with a wrong one in its place."""

import ast
import contextlib
import functools
import importlib
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, Literal

import jax

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "megajax"


@dataclass(frozen=True)
class Caught:
    """How a fault is caught. By "types": the step is refused while it is traced; "exact": `megajax verify --exact`
    names the place; "verify": only the compiled comparisons of `megajax verify` do; "tests": default tests fail, since
    no comparison of meshes can tell."""

    by: Literal["types", "exact", "verify", "tests"]
    text: str  # a part of the message, or the line of what differs first; or the arguments of pytest
    on: dict[str, Any] = field(default_factory=dict)  # options of the configuration (`tiny_config`) that shows it


@dataclass(frozen=True)
class Fault:
    name: str  # what is wrong, in words
    where: str  # module and function in `megajax`: "parallel.collectives.g"
    right: str  # an expression that the function has exactly once, whatever its formatting
    wrong: str  # what takes its place; `jax`, `jnp` and `lax` can be used
    caught: Caught

    @functools.cached_property
    def file(self) -> Path:
        """The module's file."""
        names = self.where.split(".")
        files = (PACKAGE.joinpath(*names[:end]).with_suffix(".py") for end in range(len(names), 0, -1))
        return next((file for file in files if file.exists()), PACKAGE)

    @property
    def function(self) -> str:
        """The function's name in its module, its class first."""
        return ".".join(self.where.split(".")[len(self.file.relative_to(PACKAGE).parts) :])

    @property
    def module(self) -> str:
        return ".".join(self.file.relative_to(ROOT).with_suffix("").parts)

    def planted_text(self) -> str:
        """The module's text with the fault in it.

        Raises:
            LookupError: the function does not have the expression exactly once.
        """
        if not self.file.is_file():
            raise LookupError(f"{self.name}: megajax has no module for {self.where}")
        text = self.file.read_text()
        node = _function(_parsed(text), self.function.split("."))
        if node is None:
            raise LookupError(f"{self.name}: {self.module} has no function {self.function}")
        wanted = ast.dump(ast.parse(self.right, mode="eval").body)
        found = [each for each in ast.walk(node) if isinstance(each, ast.expr) and ast.dump(each) == wanted]
        if len(found) != 1:
            raise LookupError(f"{self.name}: {self.where} has {self.right!r} {len(found)} times, not once")
        return _with_replaced(text, found[0], f"({self.wrong})")


@contextlib.contextmanager
def planted(fault: Fault) -> Iterator[None]:
    """The function in this process has the fault, for a while; nothing that was compiled before is used."""
    module = importlib.import_module(fault.module)
    code = compile(fault.planted_text(), fault.file, "exec", dont_inherit=True)
    function, qualified = _outermost(module, fault.function.split("."))
    right = function.__code__
    given = {"jax": jax, "jnp": jax.numpy, "lax": jax.lax}
    added = {name: value for name, value in given.items() if not hasattr(module, name)}
    vars(module).update(added)
    function.__code__ = _code(code, qualified)
    _forget()
    try:
        yield
    finally:
        function.__code__ = right
        for name in added:
            delattr(module, name)
        _forget()


def _forget() -> None:
    """What was computed by functions as they were."""
    jax.clear_caches()
    modules = [module for name, module in sys.modules.items() if name.startswith("megajax")]
    for cached in (value for module in modules for value in vars(module).values() if hasattr(value, "cache_clear")):
        cached.cache_clear()


_parsed = functools.cache(ast.parse)


def _function(tree: ast.AST, names: list[str]) -> ast.AST | None:
    """The definition of a function: in classes, or inside another function."""
    for name in names:
        definitions = (ast.FunctionDef, ast.ClassDef)
        inside = (node for node in ast.walk(tree) if isinstance(node, definitions) and node.name == name)
        found = next(inside, None)
        if found is None:
            return None
        tree = found
    return tree if isinstance(tree, ast.FunctionDef) else None


def _with_replaced(text: str, node: ast.expr, new: str) -> str:
    lines = text.encode().splitlines(keepends=True)
    assert node.end_lineno is not None
    before = b"".join(lines[: node.lineno - 1]) + lines[node.lineno - 1][: node.col_offset]
    after = lines[node.end_lineno - 1][node.end_col_offset :] + b"".join(lines[node.end_lineno :])
    return (before + new.encode() + after).decode()


def _outermost(module: Any, names: list[str]) -> tuple[FunctionType, str]:
    """The first function on the way to one that may stand inside it, and its qualified name."""
    found = module
    for number, name in enumerate(names):
        found = inspect.getattr_static(found, name)
        if isinstance(found, property):
            found = found.fget
        function = inspect.unwrap(getattr(found, "__func__", found))
        if isinstance(function, FunctionType):
            return function, ".".join(names[: number + 1])
    raise LookupError(f"no function: {'.'.join(names)}")


def _code(code: CodeType, name: str) -> CodeType:
    """The code of the function of a qualified name."""
    inside = [const for const in code.co_consts if isinstance(const, CodeType)]
    for each in inside:
        if each.co_qualname == name:
            return each
        if name.startswith(f"{each.co_qualname}."):
            return _code(each, name)
    raise LookupError(f"no function: {name}")
