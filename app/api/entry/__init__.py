"""Who is let in: credentials and signed tokens, rate limits."""
