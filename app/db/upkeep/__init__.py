"""What time does to the tables: what is old goes, what is small is put together. Fed by the clock and `[retention]`; feeds nothing.

Everything here works in steps of some thousand rows, oldest first, along an index, each in a short transaction of its own: killed between
two of them, the next process goes on. Which tables have partitions, and why the others have none: docs/retention.md.
"""
