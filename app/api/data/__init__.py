"""What people do to stored data over HTTP: replay what made no sense, forget somebody, change what turns are paid for."""
