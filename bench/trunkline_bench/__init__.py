import os

# Routers that benchmarks start serve no HTTP unless a benchmark asks for it: several cannot share the default port.
os.environ.setdefault("TRUNKLINE_HTTP_PORT", "-1")
