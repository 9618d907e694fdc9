"""What a person at a terminal reads and keeps: status, top, releases, diff, logs, slots, tail; signing in.

Fed by the service over HTTP, as pages are / feeds people and their scripts. Acting is in `pipelines.commands.release`.
"""
