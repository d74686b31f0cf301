"""The engine process is given its settings by a message, and nothing that it has no use for."""

import json
import os
import sys

from sayfa.wire.link import EngineProcess


async def test_no_variable_of_settings_reaches_the_engine_process(tmp_path, monkeypatch):
    """One of them holds the keys, which an engine would keep in its memory for nothing."""
    monkeypatch.setenv("SAYFA_API_KEY", "abcdef123456")
    monkeypatch.setenv("OTHER", "stays")
    told = tmp_path / "environ"
    script = f"import json, os; open({str(told)!r}, 'w').write(json.dumps(dict(os.environ)))"
    process = EngineProcess.spawn([sys.executable, "-c", script], b"")
    assert await process.end(60.0) == 0
    seen = json.loads(told.read_text())
    assert not [name for name in seen if name.startswith("SAYFA_")]
    assert seen["OTHER"] == "stays"
    assert os.environ["SAYFA_API_KEY"] == "abcdef123456"
