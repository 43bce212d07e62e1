"""Sources of adapters and base models: folders, volumes, hubs and the web. A fetch process reads each remote source.

Only the fetch process sees credentials: it gets the name of a Secret, reads it, uses it and ends. It tells the
service how many bytes have arrived, or why the fetch failed. Then the service takes the files from the folder.
"""
