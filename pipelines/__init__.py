"""Where the loop thinks: everything that runs because a message or a clock came."""
