"""The demo: real Prometheus and Alertmanager around one simulated node and one real training job, on loopback.

`python -m demo` runs it. `demo.stack.DemoStack` runs the same processes for the end-to-end tests.
"""
