"""What each page shows, as values for its template.

Fed by `app.domain.views` / feeds the templates and the files beside their tables.
"""
