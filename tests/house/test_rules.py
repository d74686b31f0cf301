"""The rules of the house hold in every file of the package, and each rule is seen to find what it looks for."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from house import source

BAD = [
    (source.dangerous_calls, "import pickle"),
    (source.dangerous_calls, "from marshal import loads"),
    (source.dangerous_calls, "import dill.source"),
    (source.dangerous_calls, "from torch import load"),
    (source.dangerous_calls, "eval('1')"),
    (source.dangerous_calls, "def f(x):\n    exec(x)"),
    (source.dangerous_calls, "torch.load(p)"),
    (source.dangerous_calls, "yaml.load(p)"),
    (source.dangerous_calls, "sock.recv_pyobj()"),
    (source.dangerous_calls, "subprocess.run(x, shell=True)"),
    (source.dangerous_calls, "np.load(p, allow_pickle=flag)"),
    (source.dangerous_calls, "ast.literal_eval(text)"),
    (source.dangerous_calls, "from builtins import eval"),
    (source.asserts, "def f(x):\n    assert x"),
    (source.built_sql, "db.execute(f'select {x}')"),
    (source.built_sql, "db.execute('select %s' % x)"),
    (source.built_sql, "db.executemany('select {}'.format(x))"),
    (source.slow_patterns, "re.compile(r'(a+)+b')"),
    (source.slow_patterns, "re.match(r'^(x*y*)*$', t)"),
    (source.slow_patterns, "re.sub('(?:ab|c+)*', '', t)"),
    (source.slow_patterns, "re.compile(rb'(a+)+b')"),
    (source.sizes, "def f():\n" + "    x = 1\n" * 60),
    (source.sizes, "class A:\n    def __init__(self, a, b, c, d, *, e, f, g, h, i):\n        pass"),
    (source.late_imports, "def f():\n    import os"),
    (source.late_imports, "class A:\n    async def f(self):\n        if 1:\n            from os import path"),
    (source.cut_quotes, "f'{name!r:.80}'"),
    (source.heads, "x = 1"),
    (source.heads, "'''Says.'''\ndef f():\n    return 1"),
    (source.heads, "'''Says.'''\nclass A:\n    def f(self):\n        return 1"),
]
GOOD = [
    (
        source.dangerous_calls,
        "import json\nmodel.eval()\nre.compile('x')\nyaml.safe_load(p)\nsubprocess.run(x, shell=False)",
    ),
    (source.built_sql, "db.execute('select ?', [x])\nexecutor.execute(plan)"),
    (source.slow_patterns, "re.compile(r'(?:a|b)+c*')\nre.compile(r'(\\d+)(\\.\\d+)?')"),
    (source.slow_patterns, "re.compile(rb'(?:a[^b]*+)*+')"),
    (source.late_imports, "import os\ndef f():\n    return os"),
    (source.cut_quotes, "f'{name!r} {size:.3f} {name:.80}'"),
    (source.heads, "'''Says.'''\ndef _f():\n    return 1\nclass A:\n    x: int"),
    (source.sizes, "class A:\n    def __init__(self, a, b, c, d, e, f, g, h):\n        pass"),
]


@pytest.mark.parametrize(("rule", "code"), BAD)
def test_each_rule_finds_bad_code(rule, code):
    assert list(rule(Path("bad.py"), ast.parse(code)))


@pytest.mark.parametrize(("rule", "code"), GOOD)
def test_no_rule_complains_of_good_code(rule, code):
    assert not list(rule(Path("good.py"), ast.parse(code)))


@pytest.mark.parametrize("rule", source.RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps_the_rule(rule):
    findings = [finding for path, tree in source.files() for finding in rule(path, tree)]
    assert not findings, "\n".join(findings)


def test_the_deciding_wing_and_the_server_load_no_torch():
    """Not only by their own imports: nothing that they import may bring it in."""
    rooms = ("base.config", "core.scheduler", "wire.process_client", "text.tokenizer", "server.serve", "bench.load")
    for room in rooms:
        program = f"import sys, sayfa.{room}; print([m for m in ('torch', 'transformers') if m in sys.modules])"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "[]", f"{room} loads {done.stdout.strip()}"


def test_the_core_needs_nothing_but_the_standard_library_and_msgspec():
    program = (
        "import sys; import sayfa.core.scheduler; "
        "print([m for m in ('numpy', 'zmq', 'jinja2', 'tokenizers', 'fastapi') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
