"""What `import megajax` offers: a thin layer over the rooms below, which the commands use as well."""
