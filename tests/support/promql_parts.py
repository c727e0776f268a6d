"""Parts of a PromQL expression."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import promql_parser as promql


def parts(expr: Any) -> Iterator[Any]:
    """Yield an expression and all expressions in it."""
    yield expr
    match expr:
        case promql.BinaryExpr():
            inside = [expr.lhs, expr.rhs]
        case promql.Call():
            inside = expr.args
        case promql.MatrixSelector():
            inside = [expr.vector_selector]
        case _:
            inside = [expr.expr] if hasattr(expr, "expr") else []
    for part in inside:
        yield from parts(part)
