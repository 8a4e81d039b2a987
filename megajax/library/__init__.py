"""What `import megajax` offers: a thin layer over the modules that the commands use too."""
