/* The packed file in memory: tables as they lie in it. weight_section.py and packed_weights.py write them. */
#ifndef LATBENCH_PACKED_FILE_H
#define LATBENCH_PACKED_FILE_H

#include "latbench.h"

enum { LATBENCH_MOST_WORDS = 256 }; /* of a frame: MOST_WORDS of native_call.py */

enum { PLACE_NUMBER = 0, PLACE_X = 1, PLACE_Y = 2, PLACE_BIAS = 3, PLACE_BUFFER = 16 };

typedef struct { uint64_t word, place; } relocation_entry;
typedef struct { uint64_t word, where, offset; } varying_entry;
typedef struct { uint64_t function, parts; } stage_entry;
typedef struct { uint64_t bytes, kept, fill, place; } buffer_entry;

typedef struct {
    uint64_t frame, words, noted, stages, stage_count, relocations, relocation_count, varying, varying_count, unused;
} step_entry;

typedef struct {
    uint64_t size, threads, kernel, kernel_length, buffers, buffer_count, steps, step_count, scratch_bytes, unused;
} program_entry;

typedef struct {
    uint64_t name, name_length, kind, activation, outputs, inputs, x[3], y[3], bias, programs, program_count, unused;
} layer_entry;

typedef struct { uint64_t functions, layer_count, layers, kept, bytes, unused[3]; } section_head;

typedef struct {
    char name[32];
    uint64_t features, section, section_bytes, first_function;
} level_entry;

typedef struct { uint64_t magic, version, bytes, checksum, library, level_count, unused[2]; } file_head;

typedef struct {
    const unsigned char *bytes; /* the whole file */
    uint64_t size;
    const level_entry *level;
    const unsigned char *section;
    const section_head *head;
    uint64_t kept; /* kept buffers that were checked */
} packed_file;

/* Map a file, check all of it, and take a level. Returns a code; what it maps `unmap_packed_file` gives back. */
int map_packed_file(const char *path, const char *level, packed_file *file, latbench_error *error);
void unmap_packed_file(packed_file *file);

/* The features of this machine, a bit for each of FEATURE_BITS of cpu_levels.py. */
uint64_t find_cpu_features(void);

/* Put a sentence into `error` if it is not NULL; returns the code. */
int set_error(latbench_error *error, int code, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* The functions of the kernels, which the export generates. */
typedef void (*kernel_part)(int64_t frame, int64_t part);
extern const kernel_part latbench_functions[];
extern const uint64_t latbench_function_count, latbench_library;

#endif
