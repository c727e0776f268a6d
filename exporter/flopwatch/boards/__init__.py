"""Server of the dashboards for browsers, without Grafana. The page that draws them is in `viewer/`."""
