"""Stages that measure or check single kernels."""
