"""The demo: real Prometheus and Alertmanager around one simulated node and one real training job, on loopback.

`python -m demo` runs it; `demo.stack.Stack` is the same set of processes for the end-to-end test.
"""
