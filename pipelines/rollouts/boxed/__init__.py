"""Programs that run inside boxes: read as text, never imported by us. Fed by `grading` and `harness`; feed them what they say."""
