"""Report of one run, queried from Prometheus and the ledger, as HTML, Markdown or JSON."""
