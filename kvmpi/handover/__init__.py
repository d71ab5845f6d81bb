"""Copies to memory that other processes read next."""
