/* Map and check a packed file. After that no place in it has to be checked again. */
#define _GNU_SOURCE
#include "packed_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { VERSION = 1, LANES = 512, ROW_BYTES = 8 * LANES, CHECKSUM_WORD = 3 };
static const uint64_t MAGIC = 0x48434E454254414CULL; /* "LATBENCH" */
static const uint64_t FACTOR = 0x9E3779B97F4A7C15ULL;

int set_error(latbench_error *error, int code, const char *format, ...) {
    if (error) {
        va_list arguments;
        va_start(arguments, format);
        error->code = code;
        vsnprintf(error->text, sizeof error->text, format, arguments);
        va_end(arguments);
    }
    return code;
}

/* The checksum of checksum.py, with 0 in place of the checksum in the file. */
static uint64_t compute_checksum(const unsigned char *bytes, uint64_t size) {
    uint64_t sums[LANES], row[LANES], found = 0;
    for (int i = 0; i < LANES; i++) sums[i] = (uint64_t)i + 1;
    for (uint64_t at = 0; at < size; at += ROW_BYTES) {
        memcpy(row, bytes + at, ROW_BYTES);
        if (at == 0) row[CHECKSUM_WORD] = 0;
        for (int i = 0; i < LANES; i++) {
            uint64_t sum = (sums[i] ^ row[i]) * FACTOR;
            sums[i] = sum ^ (sum >> 29);
        }
    }
    for (int i = 0; i < LANES; i++) {
        found = (found ^ sums[i]) * FACTOR;
        found ^= found >> 32;
    }
    return found;
}

static int check_head(const packed_file *file, const char *path, latbench_error *error) {
    const file_head *head = (const file_head *)file->bytes;
    if (file->size < sizeof *head || head->magic != MAGIC)
        return set_error(error, LATBENCH_BAD_FILE, "%s: not a packed file of latbench", path);
    if (head->version != VERSION)
        return set_error(error, LATBENCH_BAD_FILE,
                         "%s: packed file version %llu, this library reads %d; export the model again", path,
                         (unsigned long long)head->version, VERSION);
    if (head->bytes != file->size || file->size % ROW_BYTES)
        return set_error(error, LATBENCH_BAD_FILE,
                         "%s: the file has %llu bytes and should have %llu; copy or export it again", path,
                         (unsigned long long)file->size, (unsigned long long)head->bytes);
    if (compute_checksum(file->bytes, file->size) != head->checksum)
        return set_error(error, LATBENCH_BAD_FILE, "%s: damaged, its checksum is wrong; copy or export it again",
                         path);
    if (head->library != latbench_library)
        return set_error(error, LATBENCH_BAD_FILE,
                         "%s: the library is of another export; use the two that were exported together", path);
    if (head->level_count > 64 || sizeof *head + head->level_count * sizeof(level_entry) > file->size)
        return set_error(error, LATBENCH_BAD_FILE, "%s: damaged, its CPU levels do not fit into it", path);
    return LATBENCH_OK;
}

/* Whether `count` entries of `each` bytes at a place lie in the section, and where words can be read. */
static int fits(const packed_file *file, uint64_t place, uint64_t count, uint64_t each) {
    uint64_t size = file->head->bytes;
    return place % 8 == 0 && place <= size && count <= size / each && count * each <= size - place;
}

/* Whether a text of this length and the zero behind it lie in the section. */
static int holds_text(const packed_file *file, uint64_t place, uint64_t length) {
    return length < file->head->bytes && fits(file, place, length + 1, 1) && !file->section[place + length];
}

static int check_varying(const step_entry *step, const program_entry *program, const varying_entry *each) {
    if (each->word >= step->words) return 0;
    if (each->where >= PLACE_BUFFER) return each->where - PLACE_BUFFER < program->buffer_count;
    return each->where <= PLACE_BIAS;
}

static int check_step(const packed_file *file, const program_entry *program, const step_entry *step) {
    if (!fits(file, step->frame, step->words, 8) || step->words > LATBENCH_MOST_WORDS || step->noted >= step->words ||
        !fits(file, step->stages, step->stage_count, sizeof(stage_entry)) ||
        !fits(file, step->relocations, step->relocation_count, sizeof(relocation_entry)) ||
        !fits(file, step->varying, step->varying_count, sizeof(varying_entry)))
        return 0;
    const stage_entry *stages = (const stage_entry *)(file->section + step->stages);
    for (uint64_t i = 0; i < step->stage_count; i++)
        if (stages[i].function >= file->head->functions || stages[i].parts > 1 << 20) return 0;
    const relocation_entry *relocations = (const relocation_entry *)(file->section + step->relocations);
    for (uint64_t i = 0; i < step->relocation_count; i++)
        if (relocations[i].word >= step->words || relocations[i].place >= file->head->bytes) return 0;
    const varying_entry *varying = (const varying_entry *)(file->section + step->varying);
    for (uint64_t i = 0; i < step->varying_count; i++)
        if (!check_varying(step, program, varying + i)) return 0;
    return 1;
}

static int check_program(packed_file *file, const program_entry *program) {
    if (program->size == 0 || program->size >> 40 || program->threads == 0 || program->scratch_bytes >> 44 ||
        !holds_text(file, program->kernel, program->kernel_length) ||
        !fits(file, program->buffers, program->buffer_count, sizeof(buffer_entry)) ||
        !fits(file, program->steps, program->step_count, sizeof(step_entry)))
        return 0;
    const buffer_entry *buffers = (const buffer_entry *)(file->section + program->buffers);
    for (uint64_t i = 0; i < program->buffer_count; i++) {
        if (buffers[i].bytes >> 44) return 0;
        /* Each kept buffer is one program's, numbered in the order of the tables: no other one is as long. */
        if (buffers[i].kept && buffers[i].kept != ++file->kept) return 0;
        if (!buffers[i].kept && (buffers[i].place > program->scratch_bytes ||
                                 buffers[i].bytes > program->scratch_bytes - buffers[i].place))
            return 0;
    }
    const step_entry *steps = (const step_entry *)(file->section + program->steps);
    for (uint64_t i = 0; i < program->step_count; i++)
        if (!check_step(file, program, steps + i)) return 0;
    return 1;
}

static int check_layer(packed_file *file, const layer_entry *layer) {
    uint64_t most = 1ULL << 31;
    if ((layer->kind != LATBENCH_LINEAR && layer->kind != LATBENCH_CONV2D) || layer->outputs == 0 ||
        layer->outputs > most || layer->inputs == 0 || layer->inputs > most || layer->program_count == 0 ||
        !holds_text(file, layer->name, layer->name_length) ||
        !fits(file, layer->bias, layer->outputs, 4) ||
        !fits(file, layer->programs, layer->program_count, sizeof(program_entry)))
        return 0;
    for (int i = 0; i < 3; i++)
        if (layer->x[i] > 1 << 20 || layer->y[i] > 1 << 20 ||
            (layer->kind == LATBENCH_CONV2D && (layer->x[i] == 0 || layer->y[i] == 0)))
            return 0;
    if (layer->kind == LATBENCH_CONV2D && layer->y[0] != layer->outputs) return 0;
    const program_entry *programs = (const program_entry *)(file->section + layer->programs);
    int first = 0; /* whether one image or token can be run, so that any number can */
    for (uint64_t i = 0; i < layer->program_count; i++) {
        if (!check_program(file, programs + i)) return 0;
        first |= programs[i].size == 1 && programs[i].threads == 1;
    }
    return first;
}

static int check_section(packed_file *file) {
    const level_entry *level = file->level;
    if (level->section % 64 || level->section > file->size || level->section_bytes > file->size - level->section ||
        level->section_bytes < sizeof(section_head))
        return 0;
    file->section = file->bytes + level->section;
    file->head = (const section_head *)file->section;
    if (file->head->bytes != level->section_bytes || file->head->kept > 1 << 20 ||
        level->first_function > latbench_function_count ||
        file->head->functions > latbench_function_count - level->first_function ||
        !fits(file, file->head->layers, file->head->layer_count, sizeof(layer_entry)) ||
        file->head->layer_count > 1 << 20)
        return 0;
    const layer_entry *layers = (const layer_entry *)(file->section + file->head->layers);
    for (uint64_t i = 0; i < file->head->layer_count; i++)
        if (!check_layer(file, layers + i)) return 0;
    return file->kept == file->head->kept;
}

/* Take the level of this name, or the last one that this machine has. */
static int choose_level(packed_file *file, const char *path, const char *name, latbench_error *error) {
    const file_head *head = (const file_head *)file->bytes;
    const level_entry *levels = (const level_entry *)(file->bytes + sizeof *head);
    uint64_t has = find_cpu_features();
    int named = 0;
    for (uint64_t i = 0; i < head->level_count; i++) {
        if (!memchr(levels[i].name, 0, sizeof levels[i].name))
            return set_error(error, LATBENCH_BAD_FILE, "%s: damaged, a CPU level has no name", path);
        if (name && strcmp(name, levels[i].name)) continue;
        named = 1;
        if ((levels[i].features & ~has) == 0) file->level = levels + i;
    }
    if (file->level) return LATBENCH_OK;
    if (name && !named)
        return set_error(error, LATBENCH_BAD_ARGUMENT, "%s: the model was not exported for CPU level %s", path, name);
    return set_error(error, LATBENCH_UNUSABLE,
                     "%s: this machine lacks the CPU level %s; export the model for a level that it has", path,
                     name ? name : head->level_count ? levels[0].name : "of the file, which has none");
}

/* Let go of the pages that only the checksum has read: those of other levels stay in the file. */
static void release_other_levels(const packed_file *file) {
    const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), first = file->level->section / page * page;
    const uint64_t behind = (file->level->section + file->level->section_bytes + page - 1) / page * page;
    madvise((void *)file->bytes, (size_t)first, MADV_DONTNEED);
    if (behind < file->size) madvise((void *)(file->bytes + behind), (size_t)(file->size - behind), MADV_DONTNEED);
}

int map_packed_file(const char *path, const char *level, packed_file *file, latbench_error *error) {
    struct stat facts;
    memset(file, 0, sizeof *file);
    int descriptor = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK /* or a pipe waits for a writer */);
    if (descriptor < 0 || fstat(descriptor, &facts)) {
        int reason = errno;
        if (descriptor >= 0) close(descriptor);
        return set_error(error, LATBENCH_UNUSABLE, "%s: cannot be read: %s", path, strerror(reason));
    }
    if (!S_ISREG(facts.st_mode) || facts.st_size == 0) {
        close(descriptor);
        return set_error(error, LATBENCH_BAD_FILE, "%s: not a packed file of latbench", path);
    }
    void *bytes = mmap(NULL, (size_t)facts.st_size, PROT_READ, MAP_PRIVATE, descriptor, 0);
    int reason = errno;
    close(descriptor);
    if (bytes == MAP_FAILED)
        return set_error(error, LATBENCH_UNUSABLE, "%s: cannot be mapped: %s", path, strerror(reason));
    file->bytes = bytes;
    file->size = (uint64_t)facts.st_size;
    int code = check_head(file, path, error);
    if (!code) code = choose_level(file, path, level, error);
    if (!code && !check_section(file))
        code = set_error(error, LATBENCH_BAD_FILE, "%s: damaged, its tables contradict each other; export it again",
                         path);
    if (code)
        unmap_packed_file(file);
    else
        release_other_levels(file);
    return code;
}

void unmap_packed_file(packed_file *file) {
    if (file->bytes) munmap((void *)file->bytes, (size_t)file->size);
    file->bytes = NULL;
}
