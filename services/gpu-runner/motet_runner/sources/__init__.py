"""Where bytes come from: folders and volumes, a hub, the web. Remote ones are fetched by a child process of their own.

The child alone sees credentials: it gets the name of a Secret, reads it, uses it and ends. The service
hears of bytes and of failures, and takes in what lies in the folder afterwards.
"""
