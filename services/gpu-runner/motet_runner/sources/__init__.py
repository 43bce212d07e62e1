"""Sources of adapters and base models: folders, volumes, hubs and the web. A fetch process reads each remote source.

Only the fetch process sees credentials: it gets the name of a Secret, reads it, uses it and ends. The service is told
how many bytes have come, or why the fetch failed, and then takes the files from the folder.
"""
