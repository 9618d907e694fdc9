"""Who is let in: credentials and signed tokens, rate limits, the barrier against other people's pages, connections that dawdle."""
