"""The reasons that metrics show from the start are those that the source gives: none is missing, none is left over."""

import ast
from collections.abc import Iterator

from house.source import files, name
from sayfa.base.metrics import CONNECTION_ENDS, REJECTIONS
from sayfa.server.errors import StatusError

REFUSALS = {"InvalidRequest", "NotFound", "TooLarge", "Overloaded", "RateLimited", "StatusError", "Refused"}
BEFORE_REQUESTS = ("server/connection.py", "server/gate.py")
BEFORE_BOOKS = ("server/edge.py", "server/auth.py", "server/app.py")
"""What these refuse is no request in the books yet."""
OF_OTHERS = ("bench/", "cli/")


def codes(tree: ast.AST) -> Iterator[str]:
    """The codes of the request errors that are made there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in REFUSALS:
            given = [word.value for word in node.keywords if word.arg == "code"]
            if given and isinstance(given[0], ast.Constant):
                yield str(given[0].value)
            elif not given and node.func.id == "StatusError" and isinstance(node.args[0], ast.Constant):
                yield str(StatusError(int(node.args[0].value)).code)


def found(*, on_connections: bool) -> set[str]:
    skipped = OF_OTHERS if on_connections else (*OF_OTHERS, *BEFORE_REQUESTS, *BEFORE_BOOKS)
    return {
        code
        for path, tree in files()
        if not name(path).startswith(skipped) and (not on_connections or name(path) in BEFORE_REQUESTS)
        for code in codes(tree)
    }


def test_every_code_of_a_refused_request_is_shown_from_the_start():
    assert found(on_connections=False) == set(REJECTIONS) - {"invalid_request_error", "invalid_value", "other"}


def test_every_code_of_a_refused_connection_is_shown_from_the_start():
    assert found(on_connections=True) == set(CONNECTION_ENDS) - {"other"}


def test_that_rule_finds_what_it_looks_for():
    made = (
        'raise NotFound("no", code="new")\nStatusError(415)\nOverloaded("full", code=some)\nEngineError("x", code="y")'
    )
    assert list(codes(ast.parse(made))) == ["new", "unsupported_media_type"]
