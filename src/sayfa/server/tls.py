"""The files of TLS, looked at before anything is served: uvicorn reads them late, and its errors name no file.

Called by `checks`. Knows no sockets.
"""

import ssl

from sayfa.base.errors import ConfigError

# What OpenSSL says of a key that is another one's, and of one whose kind the certificate does not have.
_OTHER_KEY = {"KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED"}


def check_tls(certfile: str, keyfile: str) -> None:
    """Raise ConfigError, naming flag and file, if no server could be started with this chain and this key."""
    certificate, key = f"--ssl-certfile {certfile}", f"--ssl-keyfile {keyfile}"
    for named, path in ((certificate, certfile), (key, keyfile)):
        try:
            with open(path, "rb") as file:
                file.read(1)
        except OSError as error:
            raise ConfigError(f"{named} cannot be read: {error.strerror}") from None

    def no_password() -> str:
        """Answer in place of OpenSSL's own question, which would wait for somebody at a terminal."""
        raise ConfigError(f"{key} is protected by a password; give a key without one (`openssl pkey -in … -out …`)")

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(certfile)
    except ssl.SSLError:
        raise ConfigError(f"{certificate} holds no certificate chain in PEM form, or a damaged one") from None
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile, no_password)
    except ssl.SSLError as error:
        if error.reason in _OTHER_KEY:
            raise ConfigError(f"{key} does not belong to the certificate of {certificate}") from None
        if error.reason:
            raise ConfigError(f"{certificate} with {key} cannot be used: {error.reason}") from None
        raise ConfigError(f"{key} holds no private key in PEM form, or a damaged one") from None
