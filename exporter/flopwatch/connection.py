"""HTTP connection that is kept between requests: of the hook to its exporter, and of an exporter to a ledger."""

import http.client
from contextlib import suppress
from pathlib import Path


class KeptConnection:
    """Connection to `host`, with or without a port, that is kept until either side closes it or the CA file is new.

    If it is `secure`, the server needs a certificate of `ca_file`, or else of the system's CAs.
    """

    def __init__(self, host: str, secure: bool, ca_file: Path | None) -> None:
        self._host, self._secure, self._ca_file = host, secure, ca_file
        self._kept: http.client.HTTPConnection | None = None
        self._modified = 0  # time of the CA file that it has

    def post(
        self, path: str, body: bytes, headers: dict[str, str], timeout: float, limit: int
    ) -> tuple[http.client.HTTPResponse, bytes]:
        """Return the response and at most `limit` bytes of its body. Raises OSError or ValueError.

        `timeout` in seconds bounds each read and write. If the server has closed a kept connection, the request is sent
        once more, so it must do no harm to send it twice.
        """
        again = self._kept is not None
        try:
            self._kept = connection = self._current(timeout)
            connection.sock.settimeout(timeout)
            with suppress(ConnectionError):  # a server that refuses a long body need not read it
                connection.request("POST", path, body, headers)
            response = connection.getresponse()
            answer = response.read(limit)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            if again and not isinstance(error, TimeoutError):
                return self.post(path, body, headers, timeout, limit)
            raise error if isinstance(error, OSError) else OSError(repr(error)) from error
        if connection.sock is None or not response.isclosed():
            self.close()
        return response, answer

    def close(self) -> None:
        """Close the kept connection. The next request opens another one."""
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.close()

    def _current(self, timeout: float) -> http.client.HTTPConnection:
        """Return the kept connection, or a new one if it is closed or if the CA file has changed."""
        connection = http.client.HTTPConnection(self._host, timeout=timeout)
        try:
            modified = 0 if self._ca_file is None else self._ca_file.stat().st_mtime_ns
            if self._kept is not None and modified == self._modified:
                return self._kept
            self.close()
            if self._secure:
                import ssl  # takes 10 ms, which a hook need not pay to push to its own node

                tls = ssl.create_default_context(cafile=self._ca_file)
                connection = http.client.HTTPSConnection(self._host, timeout=timeout, context=tls)
        except OSError as error:
            raise OSError(f"cannot use the CA file: {error}") from error
        connection.connect()
        self._modified = modified
        return connection
