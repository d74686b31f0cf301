"""Without the native library tests are skipped with a reason, and fail where tests must be complete."""

import pytest

from fakes import needs


def test_a_missing_library_skips_or_fails(monkeypatch):
    monkeypatch.setattr(needs, "missing_because", "no such file")
    monkeypatch.delenv("SAYFA_TEST_COMPLETE", raising=False)
    with pytest.raises(pytest.skip.Exception, match=r"no such file.*make native"):
        needs.native_library()
    monkeypatch.setenv("SAYFA_TEST_COMPLETE", "1")
    with pytest.raises(pytest.fail.Exception, match="no such file"):
        needs.native_library()


def test_a_library_that_is_there_is_no_matter(monkeypatch):
    monkeypatch.setattr(needs, "missing_because", "")
    needs.native_library()
