"""The package's source as syntax trees, for the rules of the house. Each rule is a function from trees to findings.

A finding is "file:line: what is wrong". The rules' own tests feed them small pieces of bad code.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import sayfa

ROOT = Path(__file__).parents[2]
SOURCE = Path(sayfa.__file__).parent
"""Where the package is imported from: src/sayfa, and a broken copy of it where a test of these tests makes one."""
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 8
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "literal_eval"}
FORBIDDEN_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle"}
FORBIDDEN_ATTRIBUTES = {
    ("torch", "load"), ("yaml", "load"), ("yaml", "unsafe_load"), ("yaml", "full_load"), ("os", "system"),
    ("os", "popen"), ("socket", "recv_pyobj"), ("builtins", "eval"), ("builtins", "exec"), ("ast", "literal_eval"),
    ("numpy", "load"), ("np", "load"), ("tempfile", "mktemp"),
}  # fmt: skip
PYOBJ = {"recv_pyobj", "send_pyobj"}
LAZY_IMPORT_ROOMS = ("cli", "base/registry.py", "__init__.py")


def files() -> Iterator[tuple[Path, ast.Module]]:
    """Every file of the package with its tree."""
    for path in sorted(SOURCE.rglob("*.py")):
        yield path, ast.parse(path.read_text("utf-8"))


def name(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix() if path.is_relative_to(SOURCE) else path.name


def dangerous_calls(path: Path, tree: ast.AST) -> Iterator[str]:
    """T01, T05: nothing that turns bytes or text into code or arbitrary objects."""
    for node in ast.walk(tree):
        where = f"{name(path)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            for module in modules:
                if module.split(".")[0] in FORBIDDEN_MODULES:
                    yield f"{where}: imports {module}"
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (node.module, alias.name) in FORBIDDEN_ATTRIBUTES or (
                        node.module == "builtins" and alias.name in FORBIDDEN_CALLS
                    ):
                        yield f"{where}: imports {node.module}.{alias.name}"
        if isinstance(node, ast.Call):
            yield from (f"{where}: {problem}" for problem in _call_problems(node))


def _call_problems(node: ast.Call) -> Iterator[str]:
    match node.func:
        case ast.Name(id=called) if called in FORBIDDEN_CALLS:
            yield f"calls {called}"
        case ast.Attribute(value=ast.Name(id=owner), attr=attribute) if (owner, attribute) in FORBIDDEN_ATTRIBUTES:
            yield f"calls {owner}.{attribute}"
        case ast.Attribute(attr=attribute) if attribute in PYOBJ:
            yield f"calls {attribute}"
    if any(keyword.arg == "shell" and not _is_false(keyword.value) for keyword in node.keywords):
        yield "starts a shell"
    if any(keyword.arg == "allow_pickle" and not _is_false(keyword.value) for keyword in node.keywords):
        yield "allows pickles"


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def asserts(path: Path, tree: ast.AST) -> Iterator[str]:
    """T35: no check may vanish under `python -O`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            yield f"{name(path)}:{node.lineno}: assert"


def built_sql(path: Path, tree: ast.AST) -> Iterator[str]:
    """T23: SQL only with bound parameters."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr.startswith("execute"):
            first = node.args[0] if node.args else None
            built = isinstance(first, ast.JoinedStr | ast.BinOp) or (
                isinstance(first, ast.Call) and isinstance(first.func, ast.Attribute) and first.func.attr == "format"
            )
            if built:
                yield f"{name(path)}:{node.lineno}: SQL is put together from text"


NESTED_QUANTIFIER = re.compile(r"\((?:[^()\\]|\\.)*[+*}](?:[^()\\]|\\.)*\)[+*{]")


def slow_patterns(path: Path, tree: ast.AST) -> Iterator[str]:
    """T13: no regular expression whose time can explode: a repeated group that ends in a repetition of its own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _owner(node.func) in ("re", "regex"):
            for argument in node.args[:1]:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str | bytes):
                    given = argument.value
                    pattern = given if isinstance(given, str) else given.decode("latin-1")
                    group = NESTED_QUANTIFIER.search(_without_possessive(pattern))
                    if group and re.search(r"[+*](?:\)|\|)|[+*]\)$", group[0][:-1]):
                        yield f"{name(path)}:{node.lineno}: nested repetition in {argument.value!r}"


def _without_possessive(pattern: str) -> str:
    """Leave out repetitions that give nothing back (`*+`): they are tried once, whatever they are nested in."""
    return re.sub(r"(?<!\\)[*+?}]\+", "", pattern)


def _owner(node: ast.Attribute) -> str:
    return node.value.id if isinstance(node.value, ast.Name) else ""


def sizes(path: Path, tree: ast.AST) -> Iterator[str]:
    """Files of at most 400 lines, functions of at most 60, at most eight parameters."""
    lines = len(path.read_text("utf-8").splitlines()) if path.exists() else 0
    if lines > MAX_FILE_LINES:
        yield f"{name(path)}: {lines} lines, more than {MAX_FILE_LINES}: does it hold two duties?"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield f"{name(path)}:{node.lineno}: {node.name} has {length} lines, more than {MAX_FUNCTION_LINES}"
            if node.name == "__init__":
                count = len(node.args.posonlyargs) + len(node.args.args) + len(node.args.kwonlyargs) - 1
                if count > MAX_PARAMETERS:
                    yield f"{name(path)}:{node.lineno}: a constructor takes {count} parameters, over {MAX_PARAMETERS}"


def late_imports(path: Path, tree: ast.AST) -> Iterator[str]:
    """Imports stand at the top of a file, except in the registry, the command line and the public face."""
    if name(path).startswith(LAZY_IMPORT_ROOMS):
        return
    for outer in ast.walk(tree):
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in ast.walk(outer):
                if isinstance(node, ast.Import | ast.ImportFrom):
                    yield f"{name(path)}:{node.lineno}: an import inside {outer.name}"


def heads(path: Path, tree: ast.Module) -> Iterator[str]:
    """Each file says what it is; each public class and function of a module says what it does."""
    if not tree.body:
        return
    if not ast.get_docstring(tree):
        yield f"{name(path)}: does not say what it is"
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        plain = isinstance(node, ast.ClassDef) and _is_plain_record(node)
        if not plain and not ast.get_docstring(node):
            yield f"{name(path)}:{node.lineno}: {node.name} has no docstring"


def _is_plain_record(node: ast.ClassDef) -> bool:
    return all(isinstance(item, ast.AnnAssign | ast.Expr | ast.Pass) for item in node.body)


def cut_quotes(path: Path, tree: ast.AST) -> Iterator[str]:
    """A quoted name that is cut keeps its closing quote (`base.quoting`); `!r` with a width cuts that off."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FormattedValue) and node.conversion == ord("r") and node.format_spec is not None:
            yield f"{name(path)}:{node.lineno}: {ast.unparse(node.value)} may lose its closing quote"


RULES = (dangerous_calls, asserts, built_sql, slow_patterns, sizes, late_imports, heads, cut_quotes)
