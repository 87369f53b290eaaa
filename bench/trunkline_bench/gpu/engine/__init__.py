"""Stages that run the whole engine."""
