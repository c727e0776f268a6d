"""One run's report: asked of a Prometheus (gather.py), reckoned (statistics.py), written as HTML, Markdown or JSON."""
