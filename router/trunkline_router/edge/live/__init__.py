"""The live page over HTTP: its files, and the endpoints that it reads."""
