"""Sends an adapter's files to an object store or an OCI registry, in the form that runners and others read."""
