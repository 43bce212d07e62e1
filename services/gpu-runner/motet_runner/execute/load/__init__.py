"""From a folder of files to a model that we serve right, or to the reason why not. Nothing here runs once requests
come, but rope whose frequencies depend on a length."""
