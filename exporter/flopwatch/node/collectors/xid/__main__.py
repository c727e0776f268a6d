"""Prints docs/xid.md."""

from flopwatch.node.collectors.xid import document

print(document(), end="")
