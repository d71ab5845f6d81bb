"""Starts the roles of a job as processes, and ends them."""
