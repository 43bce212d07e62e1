"""What Motet's deployables share, and nothing that only one of them needs.

Everything that two processes must agree on lives here: the messages, the ids, the sizes, the errors, the settings and
the shape of a resource. Decisions do not: each has one owner, in its own package.
"""
