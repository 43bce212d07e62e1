"""Requests as traces record them and as laws make them, all in one form: `request.WorkloadRequest`."""
