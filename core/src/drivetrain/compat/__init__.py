"""Supports scripts and configuration files written for Accelerate."""
