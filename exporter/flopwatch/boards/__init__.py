"""The dashboards in a browser without Grafana: `viewer/` draws them, this package serves them."""
