"""HTTP client, HTTP server and web configuration shared by every flopwatch process."""
