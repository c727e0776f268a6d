"""One answer of `/metrics`: reader processes, the merge of their samples, and the text format."""
