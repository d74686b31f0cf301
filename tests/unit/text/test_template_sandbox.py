"""T04: a template can neither reach Python's inside nor cost more than its budget."""

import random
import time
import tracemalloc
from datetime import UTC, datetime

import pytest

from sayfa.base.errors import InvalidRequest, ModelError
from sayfa.text.chat_template import ChatTemplate
from sayfa.text.template_budget import (
    MAX_CPU_S,
    MAX_DEPTH,
    MAX_NODES,
    MAX_STEPS,
    Budget,
    CurrentBudget,
    OverBudgetError,
)
from sayfa.text.template_sandbox import Sandbox

MESSAGES = [{"role": "user", "content": "hello <b>"}, {"role": "assistant", "content": "x" * 200}]

# Ways into Python that were published for jinja, its sandbox, and chat templates.
ESCAPES = [
    "{{ ''.__class__ }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__.__base__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ self._TemplateReference__context.cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ namespace().__class__ }}",
    "{{ lipsum.__globals__['os'] }}",
    "{{ ''|attr('__class__') }}",
    "{{ ''|attr('\\x5f\\x5fclass\\x5f\\x5f') }}",
    "{{ ''['__class__'] }}",
    "{{ ['__class__']|map(attribute='__class__')|list }}",
    "{{ messages|map(attribute='__class__')|list }}",
    "{{ messages|selectattr('__class__')|list }}",
    "{{ messages|sum(attribute='__class__') }}",
    "{{ messages|groupby('__class__')|list }}",
    "{{ messages|sort(attribute='__class__') }}",
    "{{ messages|join(attribute='__class__') }}",
    "{{ '{0.__class__}'.format('') }}",
    "{{ '{0.__class__}'.format_map({'0': 1}) }}",
    "{{ ('{0.__class__}'|string).format(1) }}",
    "{% set f = '{0.__class__}'.format %}{{ f(1) }}",
    "{{ ['{0.__class__.__init__}']|map('format', 1)|list }}",
    "{{ '%s'|format(1) }}",
    "{{ '%(a)s' % {'a': 1} }}",
    "{{ range.__class__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__self__ }}",
    "{{ dict.__class__ }}",
    "{{ dict.fromkeys }}{{ dict.fromkeys([1]) }}",
    "{{ loop.__class__ }}{% for i in [1] %}{{ loop.__init__.__globals__ }}{% endfor %}",
    "{% for i in [1] %}{{ loop._iterator }}{{ loop._undefined.__init__ }}{% endfor %}",
    "{% macro m() %}{{ caller.__class__ }}{% endmacro %}{{ m.__init__.__globals__ }}",
    "{% macro m() %}{% endmacro %}{{ m._func.__globals__ }}",
    "{{ undefined_thing.__class__ }}",
    "{{ ''.join.__self__ }}",
    "{{ messages[0].items().__class__ }}",
    "{{ (1).__class__ }}{{ 1.5.__class__ }}",
    "{{ (1).real }}{{ (1).to_bytes(4, 'big') }}",
    "{{ 'a'.encode() }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 'x'}) }}",
    "{{ messages[0].pop('role') }}",
    "{{ messages.clear() }}",
    "{{ messages|pprint }}",
    "{{ request.application.__globals__ }}",
    "{{ config.items() }}",
    "{{ get_flashed_messages.__globals__ }}",
    "{{ url_for.__globals__ }}",
    "{{ _self.env }}",
    "{{ environment }}{{ context }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{% from 'os' import system %}",
    "{% extends 'base' %}",
    "{% block a %}{% endblock %}",
    "{{ ns._Namespace__attrs }}{% set ns = namespace(a=1) %}{{ ns._Namespace__attrs }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}{{ ns.__class__ }}",
]

BOMBS = [
    "{{ 'a' * 10**9 }}",
    "{{ [1] * 10**9 }}",
    "{{ 10**9 * 'a' }}",
    "{{ 9**9**9 }}",
    "{{ 2**100000000 }}",
    "{% for i in range(10**9) %}{% endfor %}",
    "{{ range(10**9)|list }}",
    "{{ range(20000)|join(',' * 20000) }}",
    "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
    "{% for a in range(9999) %}{% for b in range(9999) if false %}{% endfor %}{% endfor %}",
    "{% for a in range(9999) %}{% for b in range(9999) %}x{% endfor %}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x|replace('a', 'aa') %}{% endfor %}",
    "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x.replace('a', 'aa') %}{% endfor %}",
    "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x.join([ns.x, ns.x, ns.x]) %}{% endfor %}",
    "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x]|join %}{% endfor %}",
    "{% set ns = namespace(x='a') %}"
    "{% for i in range(60) %}{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x=[1]) %}"
    "{% for i in range(60) %}{% set ns.x = {'a': ns.x, 'b': ns.x} %}{% endfor %}{{ ns.x|tojson }}",
    "{% set ns = namespace(x=[1]) %}"
    "{% for i in range(60) %}{% set ns.x = dict(a=ns.x, b=ns.x) %}{% endfor %}{{ ns.x|string }}",
    "{% set ns = namespace(x=(1,)) %}"
    "{% for i in range(60) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}{{ ns.x == ns.x }}",
    "{% set ns = namespace(x=7) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(l=[]) %}{% set s = 'x' * 200000 %}"
    "{% for i in range(20000) %}{% set ns.l = ns.l + [s[1:]] %}{% endfor %}",
    "{% set s = 'x' * 200000 %}{{ ([s, s[1:] ~ 'y'] * 40000)|sort|length }}",
    "{% set s = 'x' * 200000 %}{{ range(20000)|map('string')|map('replace', '1', s)|list|length }}",
    "{% set s = 'x' * 200000 %}{{ (range(20000)|list)|select('in', [s])|list|length }}",
    "{% macro m(n) %}{{ m(n) }}{{ m(n) }}{% endmacro %}{{ m(1) }}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{% for x in [[[[1]]]] recursive %}{{ loop([x, x]) }}{% endfor %}",
    "{{ 'a'.center(10**9) }}",
    "{{ 'a'.ljust(10**9) }}{{ 'a'.zfill(10**9) }}{{ '\\t'.expandtabs(10**9) }}",
    "{{ 'a'|center(10**9) }}",
    "{{ 'a\\nb'|indent(10**9) }}",
    "{{ [1, 2]|tojson(indent=10**9) }}",
    "{{ [1, 2]|tojson(separators=['x' * 200000, 'y']) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ strftime_now('%1000000000d') }}",
    "{{ strftime_now('%Y' * 1000) }}",
    "{{ lipsum(10**6) }}",
    "{{ 1|round(-10**9) }}",
    "{{ 'a'|wordwrap(1)|truncate(10**9) }}",
    "{{ [1]|batch(10**9, 'x')|list }}",
    "{{ [1]|slice(10**9)|list }}",
]


def try_out(source: str) -> str | None:
    """Render; give the text, or None where it was refused in one of the two ways that exist."""
    try:
        return ChatTemplate(source).render(MESSAGES).text
    except (ModelError, InvalidRequest):
        return None


@pytest.mark.parametrize("source", ESCAPES)
def test_no_way_leads_into_python(source: str) -> None:
    text = try_out(source) or ""
    for sign in (
        "<class",
        "<function",
        "<built-in",
        "<bound",
        "<module",
        "object at",
        "0x",
        "root:",
        "Namespace",
        "{'a'",
    ):
        assert sign not in text


def test_messages_cannot_be_changed() -> None:
    for source in ESCAPES:
        try_out(source)
    assert MESSAGES[0] == {"role": "user", "content": "hello <b>"}


@pytest.mark.parametrize("source", BOMBS)
def test_no_template_costs_more_than_its_budget(source: str) -> None:
    start = time.thread_time()
    text = try_out(source)
    assert time.thread_time() - start < 2 * MAX_CPU_S
    assert text is None or len(text) < 400_000
    tracemalloc.start()
    try:
        try_out(source)
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("looked_at", "steps"),
    [
        ("'b' in text", 100), ("text == text", 100), ("1 < 2", 100), ("items is eq items", 100),
        ("text is lower", 19_000), ("items is upper", 6_000), ("text|float", 19_000), ("text|int(base=16)", 19_000),
    ],
)  # fmt: skip
def test_what_looks_at_a_whole_value_is_paid_for_each_time(looked_at: str, steps: int) -> None:
    """A long template without a loop does it as often as it likes; the clock is only looked at after some steps."""
    sandbox = Sandbox(lambda: datetime(2026, 1, 1, tzinfo=UTC))
    sandbox.current.value = budget = Budget(10**9, cpu_s=lambda: 0.0)
    source = f"{{% if {looked_at} %}}{{% endif %}}" * 100
    sandbox.from_string(source).render(text="a" * 200_000, items=[1] * 1000)
    assert budget._steps >= steps


def test_what_looks_at_no_whole_value_is_free() -> None:
    """Templates ask such things of each message; paid for, chats of some thousand messages would not be rendered."""
    sandbox = Sandbox(lambda: datetime(2026, 1, 1, tzinfo=UTC))
    sandbox.current.value = budget = Budget(10**9, cpu_s=lambda: 0.0)
    source = "{% if text == 'user' or 'user' != text or x is defined or items is mapping %}{% endif %}" * 100
    sandbox.from_string(source).render(text="a" * 200_000, items=[1] * 1000)
    assert budget._steps == 0
    sandbox.from_string("{% if text == '" + "a" * 65 + "' %}{% endif %}").render(text="a" * 200_000)
    assert budget._steps > 0


def test_the_deadline_is_counted_on_the_clock_that_is_handed_in() -> None:
    """By default the CPU time of the thread, so that a busy machine does not turn an honest template away."""
    clock_s = [0.0]
    budget = Budget(1000, cpu_s=lambda: clock_s[0])
    for _ in range(1000):
        budget.spend()
    clock_s[0] = MAX_CPU_S + 0.01
    with pytest.raises(OverBudgetError, match="time"):
        budget.spend(1000)


def test_values_are_bounded_in_items_depth_and_text() -> None:
    deep: list[object] = []
    for _ in range(MAX_DEPTH):
        deep = [deep]
    shared: list[object] = [1]
    for _ in range(20):
        shared = [shared, shared]
    for value in (deep, [0] * (MAX_NODES + 1), shared, {"a": "x" * 1000}, ["x" * 100] * 20):
        with pytest.raises(OverBudgetError):
            Budget(1000 if "x" in repr(value)[:20] else 10**9, cpu_s=lambda: 0.0).weigh(value)
    assert Budget(1000, cpu_s=lambda: 0.0).weigh({"a": ["bc"]}) >= len("{'a': ['bc']}") - 8


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("', '.join(['a', 'b'])", "a, b"), ("'-'.join('abc')", "a-b-c"), ("'a,b,c'.split(',')", "['a', 'b', 'c']"),
        ("'a,b,c'.split(',', 1)", "['a', 'b,c']"), ("'aXbX'.replace('X', 'y')", "ayby"),
        ("'aXbX'.replace('X', 'y', 1)", "aybX"), ("'ab'.upper()", "AB"), ("' a '.strip()", "a"),
        ("'ab'.startswith('a')", "True"), ("1.5 + 2", "3.5"), ("1 + 2", "3"), ("[1] + [2, 3]", "[1, 2, 3]"),
        ("'a' + 'b'", "ab"), ("'ab' * 3", "ababab"), ("3 * 'ab'", "ababab"), ("[1, 2] * 2", "[1, 2, 1, 2]"),
        ("2 * [0]", "[0, 0]"), ("1.5 * 2", "3.0"), ("3 * 4", "12"), ("'ab' * -1", ""),
        ("dict(a=1, b='x')", "{'a': 1, 'b': 'x'}"), ("range(3)", "range(0, 3)"), ("2 is even", "True"),
        ("['b', 'a']|map('upper')|sort|join", "AB"), ("'ba'|sort|join('-')", "a-b"), ("(7, 8)|join('.')", "7.8"),
        ("[1, none, 'x']", "[1, None, 'x']"), ("none", "None"), ("[3, 4]|map('string')|reverse|list", "['4', '3']"),
    ],
)  # fmt: skip
def test_what_is_priced_gives_what_python_gives(source: str, text: str) -> None:
    assert ChatTemplate("{{ " + source + " }}").render(MESSAGES).text == text


def test_text_marked_for_training_is_text() -> None:
    source = "{% for m in messages %}{% generation %}[{{ m.role }}]{% endgeneration %}{% endfor %}"
    assert ChatTemplate(source).render(MESSAGES).text == "[user][assistant]"


@pytest.mark.parametrize("source", ["{{ range }}", "{{ 'a'.upper }}", "{{ '%s' % 1 }}", "{{ messages[0].items }}"])
def test_what_is_neither_text_nor_data_is_not_printed(source: str) -> None:
    assert try_out(source) is None


def test_a_template_may_count_no_further_than_its_range_and_raise_in_its_own_words() -> None:
    assert try_out("{{ range(10**6)|length }}") is None
    with pytest.raises(InvalidRequest, match="only users"):
        ChatTemplate("{{ raise_exception('only users') }}").render(MESSAGES)


def test_outside_of_a_rendering_there_is_nothing_to_spend() -> None:
    with pytest.raises(OverBudgetError, match="no rendering"):
        CurrentBudget().get()


def test_each_bound_of_the_budget_says_which_it_is() -> None:
    budget = Budget(1000, cpu_s=lambda: 0.0)
    budget.spend(MAX_STEPS)
    with pytest.raises(OverBudgetError, match="too many steps"):
        budget.spend(64)


_NAMES = ["messages", "x", "ns", "ns.x", "m", "m.role", "m.content", "loop", "loop.index", "self", "range", "tools"]
_FILTERS = "abs capitalize count default first float int items join last length list lower map max min reject reverse "
_FILTERS += "select sort string title tojson trim unique upper safe dictsort string string list list tojson"
_METHODS = [
    "split",
    "strip",
    "replace",
    "join",
    "upper",
    "items",
    "get",
    "keys",
    "__class__",
    "format",
    "append",
    "index",
]


def expression(rng: random.Random, depth: int) -> str:
    """Make a random expression of jinja."""
    if depth <= 0 or rng.random() < 0.2:
        return rng.choice([*_NAMES, "1", "'a'", "'<'", "9999999", "2.5", "none", "true", "[]", "{}", "'__class__'"])
    one, two = expression(rng, depth - 1), expression(rng, depth - 1)
    return rng.choice(
        [
            f"({one} {rng.choice(['+', '-', '*', '/', '//', '%', '**', '~', 'and', 'or', '==', '<', 'in'])} {two})",
            f"({one}|{rng.choice(_FILTERS.split())})",
            f"({one}|{rng.choice(['replace', 'indent', 'join', 'default', 'map', 'select', 'attr', 'format'])}({two}))",
            f"({one}).{rng.choice(_METHODS)}({two})",
            f"({one})[{two}]",
            f"({one})[{two}:]",
            f"[{one}, {two}]",
            f"{{'k': {one}, 'l': {two}}}",
            f"({one} if {two} else 1)",
            f"range({one})",
            f"namespace(x={one})",
        ]
    )


def statement(rng: random.Random, depth: int) -> str:
    """Make a random piece of template."""
    if depth <= 0 or rng.random() < 0.2:
        return f"{{{{ {expression(rng, 2)} }}}}"
    body = statement(rng, depth - 1) + statement(rng, depth - 1)
    value = expression(rng, 2)
    return rng.choice(
        [
            f"{{% for m in {rng.choice(['messages', 'range(9999)', value])} %}}{body}{{% endfor %}}",
            f"{{% set ns = namespace(x={value}) %}}{body}",
            f"{{% for m in range(99) %}}{{% set ns.x = {value} %}}{body}{{% endfor %}}",
            f"{{% if {value} %}}{body}{{% else %}}{body}{{% endif %}}",
            f"{{% set x = {value} %}}{body}",
            f"{{% set x %}}{body}{{% endset %}}{{{{ x ~ x }}}}",
            f"{{% macro f(x) %}}{body}{{% endmacro %}}{{{{ f({value}) }}}}",
            body,
        ]
    )


def attack(seeds: range) -> int:
    rendered = 0
    for seed in seeds:
        source = "{% set ns = namespace(x='ab') %}" + statement(random.Random(seed), 3)
        start = time.thread_time()
        text = try_out(source)
        assert time.thread_time() - start < 2 * MAX_CPU_S, source
        assert "<class" not in (text or ""), source
        rendered += text is not None
    return rendered


def test_generated_templates_stay_within_bounds() -> None:
    assert attack(range(400)) > 15


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_thousand_generated_templates_stay_within_bounds() -> None:
    assert attack(range(1_000, 11_000)) > 300
