"""Supports scripts written for Accelerate."""
