"""Label of the reason why a process ends, such as `KeyError` or `OSError ENOSPC`, without the exception's message."""

import errno
import re
import sys

_STRANGE = re.compile(r"[^A-Za-z0-9_]")


def ended_by(error: BaseException | None) -> str:
    """Return the label of an exception. "" for None, and for an exception that raises when it is inspected."""
    try:
        if error is None:
            return ""
        name = _STRANGE.sub("_", str(type(error).__name__))
        name = (f"_{name}" if not name or name[0].isdigit() else name)[:64]
        if isinstance(error, SystemExit):
            # As the interpreter does: a text is printed, and the status is 1.
            code = 0 if error.code is None else error.code if isinstance(error.code, int) else 1
            return f"{name} {code}" if abs(code) < 1 << 31 else name
        number = error.errno if isinstance(error, OSError) else None
        word = errno.errorcode.get(number, "") if isinstance(number, int) else ""
        return f"{name} {word}" if word else name
    except Exception:
        return ""  # a type whose name, or an instance whose fields, are code that fails


def now() -> str:
    """Return the label of the exception being handled, else of the uncaught one that ends this process, else ""."""
    handled = sys.exc_info()[1]  # sys.last_value is set before sys.excepthook, but not after sys.exit()
    return ended_by(getattr(sys, "last_value", None) if handled is None else handled)
