"""TLS files that cannot be used stop the start, before anything is served, with a sentence that names flag and file."""

import pytest

from fakes.tls_files import CERTIFICATE, KEY, KEY_OF_ANOTHER_KIND, LOCKED_KEY, OTHER_KEY
from sayfa.base.config import ServerOptions
from sayfa.base.errors import ConfigError
from sayfa.server.serve import bind


def options(folder, certificate, key):
    """Options with files of these contents; None for a file that is not there."""
    for name, text in (("cert.pem", certificate), ("key.pem", key)):
        if text is not None:
            (folder / name).write_text(text)
    return ServerOptions(port=0, ssl_certfile=str(folder / "cert.pem"), ssl_keyfile=str(folder / "key.pem"))


@pytest.mark.parametrize("certificate", [CERTIFICATE, CERTIFICATE + KEY, CERTIFICATE + CERTIFICATE])
@pytest.mark.parametrize("key", [KEY, CERTIFICATE + KEY])
def test_a_certificate_with_its_key_is_accepted(tmp_path, certificate, key):
    bind(options(tmp_path, certificate, key)).close()


@pytest.mark.parametrize(
    ("certificate", "key", "flag", "words"),
    [
        (None, KEY, "certfile", "No such file"), (CERTIFICATE, None, "keyfile", "No such file"),
        ("junk", KEY, "certfile", "no certificate"), ("", KEY, "certfile", "no certificate"),
        (KEY, CERTIFICATE, "certfile", "no certificate"), (CERTIFICATE[:200], KEY, "certfile", "no certificate"),
        (CERTIFICATE, "junk", "keyfile", "no private key"), (CERTIFICATE, "", "keyfile", "no private key"),
        (CERTIFICATE, CERTIFICATE, "keyfile", "no private key"), (CERTIFICATE, KEY[:60], "keyfile", "no private key"),
        (CERTIFICATE, OTHER_KEY, "keyfile", "does not belong"),
        (CERTIFICATE, KEY_OF_ANOTHER_KIND, "keyfile", "does not belong"),
        (CERTIFICATE, LOCKED_KEY, "keyfile", "password"),
    ],
)  # fmt: skip
def test_files_that_cannot_be_used_are_named_with_their_flag(tmp_path, certificate, key, flag, words):
    with pytest.raises(ConfigError, match=words) as caught:
        bind(options(tmp_path, certificate, key))
    name = {"certfile": "cert.pem", "keyfile": "key.pem"}[flag]
    assert str(caught.value).startswith(f"--ssl-{flag} {tmp_path / name}")


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(ConfigError, match=f"--ssl-certfile {tmp_path} cannot be read"):
        bind(ServerOptions(port=0, ssl_certfile=str(tmp_path), ssl_keyfile=str(tmp_path)))
