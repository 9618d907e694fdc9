"""What each page shows, as values for its template.

Fed by `app.domain.sight` / feeds the templates and the files beside their tables.
"""
