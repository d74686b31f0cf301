"""Jinja for templates that come from strangers: no way to Python's inside, and a price on everything.

Called by `chat_template` only. Built on jinja2's immutable sandbox with the options that Hugging Face's templates are
written for. It knows no messages and no tokens.

How the price is taken: while a template is compiled its tree is changed, so that each turn of a loop, each macro, each
comparison and each container made passes a method of the environment; sums, products and joins are intercepted; what is
printed passes `finalize`; what is captured passes `concat`. Filters, functions and methods are those of a list, nothing
else exists.
"""

import json
import re
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import update_wrapper
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.filters import FILTERS, _GroupTuple, do_indent, make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from sayfa.text.template_budget import CONTAINERS, CurrentBudget, OverBudgetError

MAX_RANGE = 20_000
MAX_INDENT = 16


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Filters of jinja that cost no more than what they are given, those that copy a text, and those that look at all items.
_FREE_FILTERS = _words("abs count d default first items last length map reject rejectattr select selectattr")
_TEXT_FILTERS = ("capitalize", "float", "int", "lower", "reverse", "safe", "title", "trim", "upper")
_QUICK_TESTS = _words("boolean defined false float integer iterable mapping none number sequence string true undefined")
_LIST_FILTERS = ("dictsort", "groupby", "list", "max", "min", "sort", "unique")
_STR_METHODS = _words(
    "capitalize count endswith find index isalnum isalpha isascii isdecimal isdigit islower isnumeric isspace istitle "
    "isupper join lower lstrip partition removeprefix removesuffix replace rfind rindex rpartition rsplit rstrip split "
    "splitlines startswith strip swapcase title upper"
)
_METHODS: tuple[tuple[type, frozenset[str]], ...] = (
    (str, _STR_METHODS),
    (dict, frozenset({"get", "items", "keys", "values"})),
    (list, frozenset({"count", "index"})),
    (tuple, frozenset({"count", "index"})),
    (_GroupTuple, frozenset({"grouper", "list"})),
    (
        LoopContext,
        _words("changed cycle depth depth0 first index index0 last length nextitem previtem revindex revindex0"),
    ),
)
_FORBIDDEN_NODES = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends, nodes.Block, nodes.ImportedName)
_TIME_FORMAT = re.compile(r"(?:[^%]|%-?[A-Za-z%])*")


class RefusedByTemplate(jinja2.TemplateError):
    """The template itself said no, with a message written for people (`raise_exception`)."""


class _GenerationTag(jinja2.ext.Extension):
    """Reads `{% generation %}…{% endgeneration %}`, which marks text for training, and renders what is inside."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _Dict:
    """Makes a dict when called, and has nothing else to reach."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)


class Sandbox(ImmutableSandboxedEnvironment):
    """One environment for one template; `current` holds the budget of each thread's rendering."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # folding constants would compute before there is a budget
            finalize=self.printable,
            extensions=[_GenerationTag, jinja2.ext.loopcontrols],
        )
        self.current = CurrentBudget()
        self._now = now
        self.filters = {name: FILTERS[name] for name in _FREE_FILTERS}
        self.filters |= {name: self._paid(FILTERS[name], self._pay_text) for name in _TEXT_FILTERS}
        self.filters |= {name: self._paid(FILTERS[name], self._pay_items) for name in _LIST_FILTERS}
        self.filters |= {
            "tojson": self._tojson, "join": self._join, "replace": self._replace, "string": self._string,
            "indent": self._indent,
        }  # fmt: skip
        self.tests |= {  # these two write what they are given as text
            "lower": lambda value: self._pay_text(self._string(value)).islower(),
            "upper": lambda value: self._pay_text(self._string(value)).isupper(),
        }
        self.globals.clear()
        self.globals.update(
            range=self._range, dict=_Dict(), namespace=Namespace, raise_exception=_raise, strftime_now=self._strftime
        )

    # ------------------------------------------------------------------------------------- compiling

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for node in tree.find_all(_FORBIDDEN_NODES):
            raise jinja2.TemplateSyntaxError("includes, imports and blocks are not allowed", node.lineno)
        _put_price(tree)
        return tree

    # ------------------------------------------------------------------------------------- called by the compiled code

    def tick(self) -> bool:
        """Pay for one turn of a loop or one run of a macro."""
        self.current.get().spend()
        return True

    def sliced(self, value: Any) -> Any:
        """Pay for a part of a text or list, which is a copy."""
        self._pay_text(value)
        return value

    def compared(self, value: Any) -> Any:
        """Pay for a comparison or test, which may have looked at all of a text or list; `value` is what came out."""
        self.current.get().spend()
        return value

    def made(self, value: Any) -> Any:
        """Pay for a container that the template made."""
        self.current.get().weigh(value)
        return value

    def join_text(self, *parts: Any) -> str:
        """Do what `a ~ b` does."""
        texts = [str(self.printable(part)) for part in parts]
        self.current.get().chars(sum(map(len, texts)))
        return "".join(texts)

    def concat(self, parts: Iterable[str]) -> str:
        """Put captured pieces together; stops while they come if they are too many."""
        budget, kept, total = self.current.get(), [], 0
        for part in parts:
            total += len(part)
            budget.chars(total) if total > budget.max_chars else budget.spend()
            kept.append(part)
        return "".join(kept)

    def printable(self, value: Any) -> Any:
        """Allow a value to be written as text."""
        if isinstance(value, (str, int, float, Undefined)) or value is None:
            return value
        if isinstance(value, (*CONTAINERS, dict)):
            budget = self.current.get()
            budget.chars(budget.weigh(value))
            return value
        if isinstance(value, range):
            return value
        raise jinja2.TemplateRuntimeError("a value that is no text and no data cannot be printed")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = self.current.get()
        if operator == "%" and isinstance(left, str):
            raise jinja2.TemplateRuntimeError("formatting with % is not allowed; join the parts with ~")
        if operator == "+":
            return self._add(left, right)
        if operator == "*":
            self._allow_product(left, right)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            budget.bits(left.bit_length() * max(right, 0))
        value = super().call_binop(context, operator, left, right)
        return self.made(value) if isinstance(value, (list, tuple)) else value

    def _add(self, left: Any, right: Any) -> Any:
        budget = self.current.get()
        if isinstance(left, str) and isinstance(right, str):
            budget.chars(len(left) + len(right))
            return left + right
        if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
            budget.items(len(left) + len(right))
            return self.made(left + right)  # type: ignore[operator]
        value = left + right
        if isinstance(value, int):
            budget.bits(value.bit_length())
        return value

    def _allow_product(self, left: Any, right: Any) -> None:
        budget = self.current.get()
        if isinstance(left, int) and isinstance(right, int):
            budget.bits(left.bit_length() + right.bit_length())
        for many, times in ((left, right), (right, left)):
            if isinstance(times, int) and isinstance(many, str):
                budget.chars(len(many) * max(times, 0))
            elif isinstance(times, int) and isinstance(many, (list, tuple)):
                budget.items(len(many) * max(times, 0))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        budget = __self.current.get()
        budget.spend()
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str):
            return __self._call_str(owner, name, __obj, args, kwargs)
        value = super().call(__context, __obj, *args, **kwargs)
        if isinstance(value, (list, tuple, dict)) and __obj != __self.made and not isinstance(__obj, Macro):
            budget.weigh(value)
        return value

    def _call_str(self, owner: str, name: str, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        budget = self.current.get()
        for inner in ("_loop_vars", "_block_vars"):
            kwargs.pop(inner, None)
        if name == "replace":
            return self._replace(owner, *args, **kwargs)
        if name == "join":
            return self._join(args[0] if args else (), owner)
        budget.chars(len(owner))
        value = method(*args, **kwargs)
        if isinstance(value, list):
            budget.items(len(value))
        return value

    # ------------------------------------------------------------------------------------- what may be reached

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if attr.startswith("_"):
            return False
        if isinstance(obj, Namespace):
            return True
        return any(isinstance(obj, kind) and attr in names for kind, names in _METHODS)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Nothing is wrapped: `format` is not among the methods that exist here."""
        return None

    # ------------------------------------------------------------------------------------- filters and functions

    def call_filter(self, name: str, *args: Any, **kwargs: Any) -> Any:
        self.current.get().spend()
        return super().call_filter(name, *args, **kwargs)

    def call_test(self, name: str, *args: Any, **kwargs: Any) -> Any:
        self.current.get().spend()
        return super().call_test(name, *args, **kwargs)

    def _paid(self, function: Callable[..., Any], pay: Callable[[Any], Any]) -> Callable[..., Any]:
        """Wrap a filter so that its value is paid for first; filters that want the environment get it as before."""
        wants_more = getattr(function, "jinja_pass_arg", None) is not None

        def paid(*args: Any, **kwargs: Any) -> Any:
            at = 1 if wants_more else 0
            return function(*args[:at], pay(args[at]), *args[at + 1 :], **kwargs)

        return update_wrapper(paid, function)

    def _pay_text(self, value: Any) -> Any:
        budget = self.current.get()
        if isinstance(value, str):
            budget.chars(len(value))
        elif isinstance(value, (list, tuple)):
            budget.items(len(value))
        return value

    def _pay_items(self, value: Any) -> Any:
        """Pay for looking at all items and copying their texts; what comes step by step is gathered step by step."""
        budget = self.current.get()
        if not isinstance(value, (str, dict, Undefined, range, *CONTAINERS)):
            gathered: list[Any] = []
            for item in value:
                budget.spend()
                gathered.append(item)
            value = gathered
        if isinstance(value, str):
            budget.items(len(value))
        elif isinstance(value, (*CONTAINERS, dict)):
            budget.chars(budget.weigh(value))
        return value

    def _string(self, value: Any) -> str:
        return value if isinstance(value, str) else str(self.printable(value))

    def _tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: Any = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        width = len(indent) if isinstance(indent, str) else int(indent or 0)
        if width > MAX_INDENT or sum(map(len, separators or ())) > MAX_INDENT:
            raise OverBudgetError("too wide an indent")
        budget = self.current.get()
        budget.chars(budget.weigh(value, indent=width))
        text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        mark = self.current.mark  # written as an escape it could not be taken out again
        return text.replace(f"\\u{ord(mark):04x}", mark) if ensure_ascii and mark else text

    def _join(self, value: Any, d: Any = "", attribute: str | int | None = None) -> str:
        budget, between = self.current.get(), str(d)
        get = make_attrgetter(self, attribute) if attribute is not None else lambda item: item
        texts: list[str] = []
        total = 0
        for item in value:
            texts.append(str(self.printable(get(item))))
            total += len(texts[-1]) + len(between)
            budget.chars(total) if total > budget.max_chars else budget.spend()
        return between.join(texts)

    def _replace(self, value: Any, old: Any, new: Any, count: int | None = None) -> str:
        text, old, new = self._string(value), self._string(old), self._string(new)
        found = text.count(old) if count is None or count < 0 else min(text.count(old), count)
        self.current.get().chars(len(text) + found * len(new))
        return text.replace(old, new, -1 if count is None else count)

    def _indent(self, s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        size = len(width) if isinstance(width, str) else width
        if size > MAX_INDENT:
            raise OverBudgetError("too wide an indent")
        self.current.get().chars(len(s) + (s.count("\n") + 1) * size)
        return do_indent(s, width, first, blank)

    def _range(self, *args: int) -> range:
        made = range(*args)
        if len(made) > MAX_RANGE:
            raise OverBudgetError("too long a range")
        return made

    def _strftime(self, format: str) -> str:
        if len(format) > 128 or not _TIME_FORMAT.fullmatch(format):
            raise jinja2.TemplateRuntimeError("this time format is not allowed")
        return self._now().strftime(format)


def _raise(message: object) -> None:
    raise RefusedByTemplate(str(message)[:300])


def _put_price(tree: nodes.Node) -> None:
    """Change the tree so that what costs passes the environment. The names used cannot be taken by a template."""
    loop: nodes.For | nodes.Macro | nodes.CallBlock
    for loop in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):  # type: ignore[assignment]
        loop.body.insert(0, nodes.ExprStmt(_call("tick", [])).set_lineno(loop.lineno))
        if isinstance(loop, nodes.For) and loop.test is not None:
            loop.test = nodes.And(_call("tick", []), loop.test).set_lineno(loop.lineno)
    _replace_expressions(tree)


def _call(method: str, args: list[nodes.Expr]) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(method), args, [], None, None)


def _replace_expressions(node: nodes.Node) -> None:
    for field, value in node.iter_fields():
        if isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, nodes.Node):
                    _replace_expressions(item)
                    value[index] = _priced(item)
        elif isinstance(value, nodes.Node):
            _replace_expressions(value)
            setattr(node, field, _priced(value))


def _priced(node: nodes.Node) -> nodes.Node:
    if isinstance(node, nodes.Concat):
        return _call("join_text", list(node.nodes)).set_lineno(node.lineno)
    stored = getattr(node, "ctx", "load") != "load"
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice) and not stored:
        return _call("sliced", [node]).set_lineno(node.lineno)
    if isinstance(node, (nodes.Compare, nodes.Test)) and not _is_quick(node):
        return _call("compared", [node]).set_lineno(node.lineno)
    if isinstance(node, (nodes.List, nodes.Tuple, nodes.Dict)) and not stored and not _is_constant(node):
        return _call("made", [node]).set_lineno(node.lineno)
    return node


def _is_quick(node: nodes.Compare | nodes.Test) -> bool:
    """Whether a comparison or test takes the same time for a long text or list as for a short one."""
    if isinstance(node, nodes.Test):
        return node.name in _QUICK_TESTS
    short = [s for s in (node.expr, node.ops[0].expr) if isinstance(s, nodes.Const) and len(str(s.value)) <= 64]
    return bool(short) and [operand.op for operand in node.ops] in (["eq"], ["ne"])


def _is_constant(node: nodes.Node) -> bool:
    return all(isinstance(child, (nodes.Const, nodes.TemplateData)) for child in node.iter_child_nodes())
