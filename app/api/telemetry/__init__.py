"""What products say about answers: events, observations and feedback, bounded, redacted and put into the inbox."""
