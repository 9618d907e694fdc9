"""What people look at: rows of the console's pages and of the demo's terminal, and who reads them."""
