"""Connections to workers, their health, and the pools of workers that serve a model."""
